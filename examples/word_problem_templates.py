"""The templates of the word problems: each function tells one kind of story into a `Story`.

A template draws its numbers, tells two to five sentences, asks, and works the answer out step by step. Wording varies
through `[this|that]`; numbers that do not divide or that grow too large make `Story.step` reject the draw.
"""

from __future__ import annotations

from word_problem_story import Story, template


@template
def half_as_many_sold(s: Story) -> None:
    s.n(a=(10, 98, 2))
    s.tell("{A} sold {thing} to {a} of {his} friends in {month}, and then {he} sold half as many {thing} in {month2}.")
    s.ask("How many {thing} did {A} sell [altogether|in total|] in {month} and {month2}?")
    s.step("b", "a/2", "{A} sold {=} {thing} in {month2}.")
    s.step("c", "a+b", "{A} sold {=} {thing} [altogether|in total] in {month} and {month2}.")


@template
def give_and_get(s: Story) -> None:
    s.n(a=(12, 90), b=(3, 40), c=(3, 40))
    s.tell("{A} [has|owns|starts with] {a} {thing}.")
    s.tell("{He} [gives|hands] {b} [of them |]to {B}, and [then|later] [buys|finds|gets] {c} more.")
    s.ask("How many {thing} does {A} have [now|in the end|at the end]?")
    s.step("d", "a-b", "[After giving some to {B}, |]{A} has {=} {thing} [left|].")
    s.step("e", "d+c", "[Then|After that] {he} has {=} {thing}.")


@template
def times_as_many(s: Story) -> None:
    s.n(a=(4, 60), k=(2, 6))
    s.put(times=("", "", "twice", "three times", "four times", "five times", "six times")[s.vars["k"]])
    s.tell("{A} has {a} {thing}. {B} has {times} as many {thing} as {A}.")
    s.ask("How many {thing} do they have [in total|altogether|together|in all]?")
    s.step("b", "k*a", "{B} has {=} {thing}.")
    s.step("c", "a+b", "[Together|Altogether|In total], they have {=} {thing}.")


@template
def three_way_comparison(s: Story) -> None:
    s.n(a=(5, 50), b=(3, 30), k=(2, 4))
    s.put(times=("", "", "twice", "three times", "four times")[s.vars["k"]])
    s.tell("{A} [collected|picked|gathered] {a} {thing}. {B} [collected|picked|gathered] {b} more {thing} than {A}.")
    s.tell("{C} [collected|picked|gathered] {times} as many {thing} as {B}.")
    if s.rng.random() < 0.5:
        s.ask("How many {thing} did {C} [collect|get|end up with]?")
        s.step("x", "a+b", "{B} [collected|has] {=} {thing}.")
        s.step("y", "k*x", "{C} [collected|has] {=} {thing}.")
        return
    s.ask("How many {thing} did the three of them [collect|get] [altogether|in total|in all]?")
    s.step("x", "a+b", "{B} [collected|has] {=} {thing}.")
    s.step("y", "k*x", "{C} [collected|has] {=} {thing}.")
    s.step("z", "a+x+y", "[Altogether|In total], they have {=} {thing}.")


@template
def fewer_than(s: Story) -> None:
    s.n(a=(20, 95), b=(3, 18))
    s.tell("There are {a} {colour} {thing} in a [box|drawer|jar|bag].")
    s.tell("There are {b} fewer {colour2} {thing} than {colour} ones.")
    s.ask("How many {thing} are [there|in it] [altogether|in total|in all]?")
    s.step("c", "a-b", "There are {=} {colour2} {thing}.")
    s.step("d", "a+c", "[In total|Altogether], there are {=} {thing}.")


@template
def boxes(s: Story) -> None:
    s.n(a=(3, 15), b=(4, 24), c=(2, 30))
    s.tell("{A} has {a} [boxes|bags|crates] of {thing} with {b} {thing} in each.")
    s.tell("{He} [loses|gives away|sells|throws out] {c} [of the|of these|] {thing}.")
    s.ask("How many {thing} [are left|does {he} have left|remain]?")
    s.step("d", "a*b", "[At first|In the beginning], {A} has {=} {thing}.")
    s.step("e", "d-c", "{He} has {=} {thing} left.")


@template
def broken_fraction(s: Story) -> None:
    s.n(a=(4, 12), b=(6, 20), k=(2, 5))
    s.put(part=("", "", "Half", "A third", "A quarter", "A fifth")[s.vars["k"]])
    s.tell("A [shop|store|warehouse] receives {a} [boxes|crates] with {b} {thing} in each [one|box].")
    s.tell("{part} of the {thing} are [broken|damaged|sold the same day].")
    s.ask("How many {thing} are [left|not affected|still on the shelf]?")
    s.step("c", "a*b", "[The shop receives|There are] {=} {thing} [in total|].")
    s.step("d", "c/k", "{=} of them are [gone|lost].")
    s.step("e", "c-d", "So {=} {thing} are left.")


@template
def change_from_bill(s: Story) -> None:
    s.n(a=(2, 9), p=(2, 9), bill=(20, 100, 10))
    s.need("a*p < bill")
    s.tell("{A} [buys|gets|picks up] {a} {food} at the {place}. [Each one|Each] costs ${p}.")
    s.tell("{He} pays with [a total of |]${bill}.")
    s.ask("How much change [does {he} get|should {he} get|will {he} receive]?")
    s.step("c", "a*p", "The {food} cost {$}[ in total|].")
    s.step("d", "bill-c", "{A} [gets|receives] {$} [in change|back].")


@template
def two_items_cost(s: Story) -> None:
    s.n(a=(2, 12), p=(2, 12), b=(2, 12), r=(2, 12))
    s.tell("{A} [bought|ordered|purchased] {a} {thing} [for|at] ${p} each and {b} {other} [for|at] ${r} each.")
    s.ask("How much [money |]did {he} spend [in total|altogether|in all]?")
    s.step("c", "a*p", "The {thing} cost {$}.")
    s.step("d", "b*r", "The {other} cost {$}.")
    s.step("e", "c+d", "[In total|Altogether], {A} spent {$}.")


@template
def shopping_list(s: Story) -> None:
    goods = s.rng.sample(
        ["a shirt", "a pair of shoes", "a hat", "a jacket", "a bag", "a belt", "a lamp", "a chair", "a ball", "a game"],
        4,
    )
    s.put(g1=goods[0], g2=goods[1], g3=goods[2], g4=goods[3])
    s.n(a=(8, 60), b=(5, 40), c=(3, 30), e=(2, 30))
    s.tell("{A} went [shopping|to the {place}] on {day}.")
    if s.rng.random() < 0.5:
        s.tell("{He} bought {g1} for ${a}, {g2} for ${b} and {g3} for ${c}.")
        s.put(money=s.vars["a"] + s.vars["b"] + s.vars["c"] + s.vars["e"])
        s.tell("{He} had ${money} [with {him}|in {his} wallet|to spend].")
        s.ask("How much money did {he} have left?")
        s.step("t", "a+b+c", "{A} spent {$}.")
        s.step("l", "money-t", "{He} had {$} left.")
        return
    s.tell("{He} bought {g1} for ${a} and {g2} for ${b}, and {g3} that cost ${c} more than {g2}.")
    s.ask("How much did {A} spend [in total|altogether|on everything]?")
    s.step("x", "b+c", "[The third item|The last item] cost {$}.")
    s.step("t", "a+b+x", "[In total|Altogether], {he} spent {$}.")


@template
def percent_discount(s: Story) -> None:
    s.n(p=(20, 400, 10), k=(10, 50, 5))
    s.tell("A {gear} [normally |]costs ${p}.")
    s.tell("[During a sale|This week|Today], [it is {k}% off|there is a {k}% discount].")
    s.ask("How much does {A} pay for the {gear} [with the discount|during the sale|now]?")
    s.step("d", "p*k/100", "The discount is {$}.")
    s.step("e", "p-d", "{A} pays {$}[ for the {gear}|].")


@template
def percent_of_group(s: Story) -> None:
    s.n(a=(20, 400, 20), k=(10, 90, 5))
    s.put(kind=s.one("students", "members", "visitors", "workers", "guests", "children"))
    s.put(what=s.one("walk to the event", "wear glasses", "like soccer", "have a pet", "bring lunch", "play music"))
    s.tell("There are {a} {kind} at the {place}. {k}% of them {what}.")
    s.ask("How many {kind} do not {what}?")
    if s.rng.random() < 0.5:
        s.step("b", "a*k/100", "{=} {kind} {what}.")
        s.step("c", "a-b", "So {=} {kind} do not {what}.")
        return
    s.step("b", "100-k", "{=}% of the {kind} do not {what}.")
    s.step("c", "a*b/100", "That is {=} {kind}.")


@template
def percent_growth(s: Story) -> None:
    s.n(a=(100, 2000, 100), k=(5, 50, 5))
    s.tell("A [town|village|club|school] had {a} [members|people] [last year|in the spring].")
    s.tell("This year the number [grew|went up|increased] by {k}%.")
    s.ask("How many people are there now?")
    s.step("b", "a*k/100", "The number [grew|went up] by {=} people.")
    s.step("c", "a+b", "There are {=} people now.")


@template
def weekly_wage(s: Story) -> None:
    s.n(h=(3, 9), d=(2, 6), p=(8, 25), w=(2, 5))
    s.tell("{A} works {h} hours a day, {d} days a week, and earns ${p} an hour.")
    if s.rng.random() < 0.5:
        s.ask("How much does {he} [earn|make] in {w} weeks?")
        s.step("a", "h*d", "{A} works {=} hours a week.")
        s.step("b", "a*p", "{He} [earns|makes] {$} a week.")
        s.step("c", "b*w", "In {w} weeks {he} [earns|makes] {$}.")
        return
    s.ask("How much does {he} [earn|make] [in a week|each week|per week]?")
    s.step("a", "h*d", "{A} works {=} hours a week.")
    s.step("b", "a*p", "{He} [earns|makes] {$} a week.")


@template
def overtime(s: Story) -> None:
    s.n(p=(8, 20), e=(2, 10), h=(20, 40, 5), o=(2, 10))
    s.tell("{A} is paid ${p} per hour for the first {h} hours and ${e} [more|extra] per hour for overtime.")
    s.tell("[This week|Last week], {he} worked {h} regular hours and {o} hours of overtime.")
    s.ask("What [was|is] {his} total pay?")
    s.step("a", "p*h", "[Regular pay is|The regular hours pay] {$}.")
    s.step("b", "p+e", "The overtime rate is {$} per hour.")
    s.step("c", "b*o", "[Overtime pay is|The overtime hours pay] {$}.")
    s.step("d", "a+c", "{His} total pay is {$}.")


@template
def save_for_gear(s: Story) -> None:
    s.n(w=(3, 15), a=(5, 30), have=(10, 80, 5))
    s.put(cost=s.vars["w"] * s.vars["a"] + s.vars["have"])
    s.tell("{A} wants to buy a {gear} that costs ${cost}. {He} [already has|has already saved] ${have}.")
    s.tell("{He} [saves|puts aside] ${a} [every|each] week.")
    s.ask("How many weeks [does {he} need|will it take {him}] to save enough [money|]?")
    s.step("b", "cost-have", "{A} still needs {$}.")
    s.step("c", "b/a", "It [takes|will take] {him} {=} weeks.")


@template
def allowance_and_chores(s: Story) -> None:
    s.n(a=(5, 20), b=(2, 9), c=(2, 8), w=(2, 8))
    s.tell("{A} gets ${a} of allowance a week and [another|an extra] ${b} for each chore {he} does.")
    s.tell("{He} does {c} chores [every|each] week.")
    s.ask("How much money does {he} get in {w} weeks?")
    s.step("d", "b*c", "{A} gets {$} a week for chores.")
    s.step("e", "a+d", "[So|In total] {he} gets {$} a week.")
    s.step("f", "e*w", "In {w} weeks {he} gets {$}.")


@template
def two_leg_trip(s: Story) -> None:
    s.n(v=(20, 70, 5), t=(2, 6), u=(20, 70, 5), r=(2, 5))
    s.put(move=s.one("drives", "rides", "travels", "cycles"))
    s.tell(
        "{A} {move} at {v} miles per hour for {t} hours[, and then|. "
        "Then {he} goes] at {u} miles per hour for {r} hours."
    )
    s.ask("How [far|many miles] does {he} [travel|go] [in total|altogether|in all]?")
    s.step("a", "v*t", "In the first part {he} [travels|goes] {=} miles.")
    s.step("b", "u*r", "In the second part {he} [travels|goes] {=} miles.")
    s.step("c", "a+b", "[In total|Altogether], that is {=} miles.")


@template
def travel_time(s: Story) -> None:
    s.n(v=(10, 60, 5), t=(2, 9), b=(5, 80, 5))
    s.put(dist=s.vars["v"] * s.vars["t"] + s.vars["b"])
    s.tell("The distance [from {A}'s house to the lake|between two towns|to the beach] is {dist} miles.")
    s.tell("{A} has already gone {b} miles, and [goes on|continues] at {v} miles per hour.")
    s.ask("How many [more |]hours [does {he} need|will it take] to [arrive|get there]?")
    s.step("c", "dist-b", "There are {=} miles left.")
    s.step("d", "c/v", "It takes {=} hours.")


@template
def fuel_cost(s: Story) -> None:
    s.n(m=(15, 40, 5), g=(3, 20), p=(2, 6))
    s.put(d=s.vars["m"] * s.vars["g"])
    s.tell("{A}'s car goes {m} miles on one gallon of gas. Gas costs ${p} per gallon.")
    s.ask("How much does {he} pay for gas on a trip of {d} miles?")
    s.step("a", "d/m", "{A} needs {=} gallons [of gas|].")
    s.step("b", "a*p", "That costs {$}.")


@template
def reading_pages(s: Story) -> None:
    s.n(a=(8, 40), d=(3, 9), r=(2, 12), k=(5, 30))
    s.put(total=s.vars["a"] * s.vars["d"] + s.vars["k"] * s.vars["r"])
    s.tell("{A} is reading a book with {total} pages. {He} reads {a} pages a day for {d} days.")
    s.tell("After that, {he} reads {k} pages a day.")
    s.ask("How many more days does {he} need to finish the book?")
    s.step("b", "a*d", "In the first {d} days {A} reads {=} pages.")
    s.step("c", "total-b", "There are {=} pages left.")
    s.step("e", "c/k", "{He} needs {=} more days.")


@template
def pages_rest(s: Story) -> None:
    s.n(a=(10, 60), b=(4, 30), total=(100, 300, 10))
    s.tell("{A} read {a} pages on {day} and {b} more pages than that on {later}. The book has {total} pages.")
    s.ask("How many pages are left to read?")
    s.step("c", "a+b", "{A} read {=} pages on {later}.")
    s.step("d", "a+c", "{He} has read {=} pages.")
    s.step("e", "total-d", "There are {=} pages left.")


@template
def ages_now(s: Story) -> None:
    s.quiet = True
    s.n(a=(6, 40), k=(2, 3), b=(2, 20))
    s.put(times=("", "", "twice", "three times")[s.vars["k"]])
    s.tell("{A} is {a} years old. {B} is {times} as old as {A}, and {C} is {b} years older than {B}.")
    s.ask("[How old is {C}|What is {C}'s age]?")
    s.step("c", "k*a", "{B} is {=} years old.")
    s.step("d", "c+b", "{C} is {=} years old.")


@template
def ages_future(s: Story) -> None:
    s.quiet = True
    s.n(a=(12, 50), b=(2, 10), y=(3, 15))
    s.tell("{A} is {a} years old. {His} {kin} {B} is {b} years younger[ than {him}|].")
    s.ask("What will be the sum of their ages in {y} years?")
    s.step("c", "a-b", "{B} is {=} years old now.")
    s.step("d", "a+y", "In {y} years, {A} will be {=} years old.")
    s.step("e", "c+y", "In {y} years, {B} will be {=} years old.")
    s.step("f", "d+e", "The sum of their ages will be {=}.")


@template
def ages_sum(s: Story) -> None:
    s.quiet = True
    s.n(a=(5, 40), d=(2, 20))
    s.put(total=2 * s.vars["a"] + s.vars["d"])
    s.tell("The ages of {A} and {B} add up to {total} years. {B} is {d} years older than {A}.")
    s.ask("How old is {A}?")
    s.step("b", "total-d", "Without the difference, the two ages add up to {=} years.")
    s.step("c", "b/2", "{A} is {=} years old.")


@template
def share_equally(s: Story) -> None:
    s.n(m=(3, 20), k=(3, 9), e=(2, 12))
    s.put(a=s.vars["m"] * s.vars["k"] + s.vars["e"])
    s.tell("{A} has {a} {food}. {He} [eats|keeps] {e} of them and [shares|divides] the rest equally among {k} friends.")
    s.ask("How many {food} does each friend get?")
    s.step("b", "a-e", "{A} shares {=} {food}.")
    s.step("c", "b/k", "Each friend gets {=} {food}.")


@template
def share_with_remainder(s: Story) -> None:
    s.n(k=(4, 12), m=(3, 12), left=(2, 8))
    s.need("left < k")
    s.put(a=s.vars["k"] * s.vars["m"] + s.vars["left"])
    s.tell("{A} packs {a} {thing} into [boxes|bags] of {k}. {He} fills as many as {he} can.")
    s.put(full=s.vars["m"])
    s.ask("If {he} fills {full} of them, how many {thing} are left over?")
    s.step("b", "full*k", "{He} packs {=} {thing}.")
    s.step("c", "a-b", "There are {=} {thing} left over.")


@template
def fraction_of_class(s: Story) -> None:
    s.n(m=(4, 15), k=(3, 6), j=(2, 5))
    s.need("j < k")
    s.put(a=s.vars["m"] * s.vars["k"], what=s.one("girls", "in the choir", "on the team", "left-handed"))
    s.tell("There are {a} [students|children] in {A}'s class[ this year|]. {j}/{k} of them are {what}.")
    s.ask("How many [students|children] are not {what}?")
    s.step("b", "a*j/k", "{=} of them are {what}.")
    s.step("c", "a-b", "So {=} of them are not {what}.")


@template
def rows_of_seats(s: Story) -> None:
    s.n(r=(4, 20), c=(5, 20), e=(3, 40))
    s.tell("A [hall|theater|classroom|cinema] has {r} rows [of|with] {c} seats [each|in each row].")
    s.tell("{e} seats are [empty|free|not taken].")
    s.ask("How many [people are sitting there|seats are taken]?")
    s.step("a", "r*c", "There are {=} seats.")
    s.step("b", "a-e", "{=} of them are taken.")


@template
def garden(s: Story) -> None:
    s.n(r=(3, 12), c=(4, 15), k=(2, 6), p=(2, 5))
    s.tell("{A} plants {r} rows of {c} [tomato|pepper|bean|squash|berry] plants.")
    s.tell("Each plant [gives|produces|yields] {k} pounds of [fruit|crop].")
    if s.rng.random() < 0.5:
        s.ask("How many pounds does {he} [harvest|get] [in total|]?")
        s.step("a", "r*c", "There are {=} plants.")
        s.step("b", "a*k", "They [give|produce] {=} pounds.")
        return
    s.tell("{He} sells it all for ${p} a pound.")
    s.ask("How much money does {he} [make|get]?")
    s.step("a", "r*c", "There are {=} plants.")
    s.step("b", "a*k", "They [give|produce] {=} pounds.")
    s.step("d", "b*p", "{A} [makes|gets] {$}.")


@template
def eggs_per_day(s: Story) -> None:
    s.n(a=(10, 40), b=(2, 5), c=(2, 5), p=(2, 5))
    s.tell("{A}'s [ducks|hens|chickens|geese] lay {a} eggs per day.")
    s.tell("{He} eats {b} for breakfast [every morning|each day] and bakes [muffins|a cake|bread] with {c}.")
    s.tell("{He} sells the [rest|remainder] at the [farmers' market|market|{place}] for ${p} per egg.")
    s.ask("How much [in dollars |]does {he} make [every day|each day] [at the market|]?")
    s.step("d", "a-b-c", "{A} sells {=} eggs a day.")
    s.step("e", "d*p", "{He} makes {$} every day.")


@template
def dozens(s: Story) -> None:
    s.n(d=(2, 9), p=(2, 6), e=(2, 10))
    s.tell("{A} [buys|gets|orders] {d} dozen {food}. {e} of them [are bad|go bad|are eaten on the way].")
    if s.rng.random() < 0.5:
        s.ask("How many {food} are left?")
        s.step("a", "d*12", "{A} [buys|gets] {=} {food}.")
        s.step("b", "a-e", "There are {=} {food} left.")
        return
    s.tell("{He} sells the [good ones|others|rest] for ${p} each.")
    s.ask("How much money does {he} [make|get]?")
    s.step("a", "d*12", "{A} [buys|gets] {=} {food}.")
    s.step("b", "a-e", "{He} sells {=} of them.")
    s.step("c", "b*p", "{He} [makes|gets] {$}.")
