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


@template
def bakery_trays(s: Story) -> None:
    s.n(t=(3, 12), c=(6, 24), b=(3, 10))
    s.need("(t*c) % b == 0")
    s.put(food=s.one("cookies", "muffins", "rolls", "bagels", "brownies", "pretzels", "cupcakes", "donuts"))
    s.tell(
        "A [baker|bakery|cook] bakes {t} trays of {food} with {c} "
        "{food} on each tray, and packs them in [boxes|bags] of {b}."
    )
    s.ask("How many [boxes|bags] are [needed|filled]?")
    s.step("a", "t*c", "There are {=} {food}.")
    s.step("d", "a/b", "So {=} of them are needed.")


@template
def recipe(s: Story) -> None:
    s.n(c=(2, 6), m=(4, 12), k=(2, 9), h=(2, 9))
    s.put(n=s.vars["m"] * s.vars["k"])
    s.tell("A recipe needs {c} cups of [flour|milk|sugar|oats] [to make|for] {m} {food}.")
    s.tell("{A} wants to make {n} {food}, and {he} has {h} cups.")
    s.need("k*c > h")
    s.ask("How many more cups does {he} need?")
    s.step("a", "n/m", "{A} [makes|needs] {=} batches.")
    s.step("b", "a*c", "That takes {=} cups.")
    s.step("d", "b-h", "{He} needs {=} more cups.")


@template
def water_tank(s: Story) -> None:
    s.n(r=(4, 20), q=(2, 10), t=(3, 15), a=(10, 90, 5))
    s.need("r > q + 1")
    s.tell("A tank [holds|contains] {a} gallons of water.")
    s.tell("Water flows in at {r} gallons a minute and leaks out at {q} gallons a minute.")
    s.ask("How many gallons are in the tank after {t} minutes?")
    s.step("b", "r-q", "The tank gains {=} gallons a minute.")
    s.step("c", "b*t", "In {t} minutes it gains {=} gallons.")
    s.step("d", "a+c", "Then there are {=} gallons in the tank.")


@template
def fence(s: Story) -> None:
    s.n(a=(5, 60), b=(4, 40), p=(2, 9))
    s.tell("{A} has a rectangular [garden|yard|field] that is {a} feet long and {b} feet wide.")
    s.tell("{He} wants to put a fence around it.")
    s.tell("[The fence|Fencing] costs ${p} per foot.")
    s.ask("How much does the fence cost?")
    s.step("c", "a+b", "The length and the width add up to {=} feet.")
    s.step("d", "c*2", "The perimeter is {=} feet.")
    s.step("e", "d*p", "The fence costs {$}.")


@template
def tiles(s: Story) -> None:
    s.n(a=(4, 20), b=(3, 15), k=(2, 6), p=(2, 9))
    s.tell("A [floor|wall|patio] is {a} feet by {b} feet.")
    s.tell("[One tile covers one square foot|Each square foot needs one tile] and costs ${p}.")
    s.tell("{A} buys {k} spare tiles too.")
    s.ask("How much does {he} pay for the tiles?")
    s.step("c", "a*b", "The area is {=} square feet.")
    s.step("d", "c+k", "{A} buys {=} tiles.")
    s.step("e", "d*p", "{He} pays {$}.")


@template
def perimeter_side(s: Story) -> None:
    s.n(a=(4, 50), b=(2, 30))
    s.put(p=2 * (s.vars["a"] + s.vars["b"]))
    s.tell("The perimeter of a rectangular [table|park|room|pool] is {p} feet. It is {a} feet long.")
    s.ask("How many feet wide is it?")
    s.step("c", "p/2", "The length and the width add up to {=} feet.")
    s.step("d", "c-a", "It is {=} feet wide.")


@template
def temperature(s: Story) -> None:
    s.n(a=(40, 80), b=(4, 15), c=(3, 20))
    s.tell("[In the morning|At 8 o'clock|At dawn] the temperature was {a} degrees.")
    s.tell("It [rose|went up] by {b} degrees by noon and [fell|dropped] by {c} degrees [at night|in the evening].")
    s.ask("What was the temperature [then|in the end|at night]?")
    s.step("d", "a+b", "At noon it was {=} degrees.")
    s.step("e", "d-c", "[In the end|At night] it was {=} degrees.")


@template
def game_points(s: Story) -> None:
    s.n(a=(2, 12), p=(2, 10), b=(2, 10), q=(2, 10), c=(2, 20))
    s.tell(
        "In a [game|contest|quiz], each {colour} [card|star|ring] is "
        "worth {p} points and each {colour2} one is worth {q} points."
    )
    s.tell(
        "{A} [gets|collects|wins] {a} {colour} ones and {b} {colour2} "
        "ones[, but loses|, and then loses] {c} points for a mistake."
    )
    s.ask("[What is {his} score|How many points does {he} have] [in the end|at the end|]?")
    s.step("d", "a*p", "The {colour} ones give {=} points.")
    s.step("e", "b*q", "The {colour2} ones give {=} points.")
    s.step("f", "d+e", "[Together|In total] that is {=} points.")
    s.step("g", "f-c", "After the mistake {he} has {=} points.")


@template
def average_of_three(s: Story) -> None:
    s.n(a=(10, 99), b=(10, 99), c=(10, 99))
    s.need("(a+b+c) % 3 == 0")
    s.tell("{A} scored {a}, {b} and {c} points in three [games|tests|rounds].")
    s.ask("What is {his} average score?")
    s.step("d", "a+b+c", "{A} scored {=} points in total.")
    s.step("e", "d/3", "{His} average is {=} points.")


@template
def average_needed(s: Story) -> None:
    s.n(a=(60, 95), b=(60, 95), m=(70, 90))
    s.need("3*m-a-b <= 100 and 3*m-a-b >= 40")
    s.tell("{A} got {a} and {b} [points |]on two tests. {He} wants an average of {m} on three tests.")
    s.ask("What score does {he} need on the third test?")
    s.step("c", "m*3", "{A} needs {=} points in total.")
    s.step("d", "a+b", "{He} has {=} points so far.")
    s.step("e", "c-d", "{He} needs {=} points on the third test.")


@template
def bus_passengers(s: Story) -> None:
    s.n(a=(10, 50), b=(2, 20), c=(2, 20), d=(2, 15))
    s.tell("A [bus|train|ferry] [leaves|starts] with {a} passengers.")
    s.tell("At the first stop {b} people get off and {c} get on.")
    s.tell("At the second stop {d} [people |]get [off|out].")
    s.ask("How many passengers are [left|on it now|on board now]?")
    s.step("e", "a-b", "After {b} people get off, there are {=} passengers.")
    s.step("f", "e+c", "After {c} people get on, there are {=} passengers.")
    s.step("g", "f-d", "After the second stop there are {=} passengers.")


@template
def tickets(s: Story) -> None:
    s.n(a=(5, 60), p=(6, 20), b=(5, 60), q=(2, 8))
    s.tell("[Tickets to|Seats at] the [fair|show|zoo|concert|play] cost ${p} for adults and ${q} for children.")
    s.tell("{a} adults and {b} children [came|bought tickets] on {day}.")
    s.ask("How much money was [collected|made|taken in]?")
    s.step("c", "a*p", "The adults paid {$}.")
    s.step("d", "b*q", "The children paid {$}.")
    s.step("e", "c+d", "[In total|Altogether], {$} was collected.")


@template
def profit(s: Story) -> None:
    s.n(a=(5, 40), c=(2, 15), d=(2, 12))
    s.put(p=s.vars["c"] + s.vars["d"])
    s.tell("{A} makes {thing} [and sells them|to sell] at the {place}.")
    s.tell("[It costs {him}|{He} pays] ${c} to make one, and {he} sells it for ${p}.")
    s.ask("How much profit does {he} make [on|if {he} sells] {a} {thing}?")
    if s.rng.random() < 0.6:
        s.step("x", "p-c", "{A} makes {$} of profit on each one.")
        s.step("y", "x*a", "[In total|For {a} {thing}] {he} makes {$}.")
        return
    s.step("x", "p*a", "{A} gets {$} for the {thing}.")
    s.step("y", "c*a", "{He} pays {$} to make them.")
    s.step("z", "x-y", "{His} profit is {$}.")


@template
def split_bill(s: Story) -> None:
    s.n(k=(3, 8), b=(20, 200, 10), t=(10, 20, 5))
    s.tell("{k} friends eat [dinner|lunch] [together|at a diner|at a café].")
    s.tell("The bill is ${b}, and they add a {t}% tip and split the total equally.")
    s.ask("How much does each [friend|of them] pay?")
    s.step("c", "b*t/100", "The tip is {$}.")
    s.step("d", "b+c", "The total is {$}.")
    s.step("e", "d/k", "Each friend pays {$}.")


@template
def animal_legs(s: Story) -> None:
    s.put(animal=s.one("cows", "sheep", "goats", "horses", "pigs"), beast=s.one("ducks", "hens", "geese", "turkeys"))
    s.n(a=(3, 40), b=(3, 40))
    s.tell("A farm has {a} {animal} and {b} {beast}.")
    s.ask("How many legs do [the animals|they] have [altogether|in total|in all]?")
    s.step("c", "a*4", "The {animal} have {=} legs.")
    s.step("d", "b*2", "The {beast} have {=} legs.")
    s.step("e", "c+d", "[Altogether|In total], there are {=} legs.")


@template
def farm_compare(s: Story) -> None:
    s.n(a=(5, 60), k=(2, 5), b=(3, 20))
    s.put(times=("", "", "twice", "three times", "four times", "five times")[s.vars["k"]])
    s.tell("{A} has {a} {animal}, and {times} as many {beast} as {animal}.")
    s.tell("[Then|Later] {he} [sells|gives away] {b} {beast}.")
    s.ask("How many animals does {he} have [now|left|in the end]?")
    s.step("c", "a*k", "At first {he} has {=} {beast}.")
    s.step("d", "c-b", "After that {he} has {=} {beast}.")
    s.step("e", "a+d", "{A} has {=} animals now.")


@template
def fundraiser(s: Story) -> None:
    s.n(a=(4, 30), p=(2, 9), b=(3, 20), goal=(100, 600, 50))
    s.need("goal > (a+b)*p + 1")
    s.tell("{A} [runs|swims|walks] laps to raise money. {He} gets ${p} for each lap.")
    s.tell("{He} does {a} laps on {day} and {b} on {later}.")
    s.tell("{His} goal is ${goal}.")
    s.ask("How much more money does {he} need[ to reach the goal|]?")
    s.step("c", "a+b", "{A} does {=} laps.")
    s.step("d", "c*p", "{He} raises {$}.")
    s.step("e", "goal-d", "{He} needs {$} more.")


@template
def machines(s: Story) -> None:
    s.n(m=(2, 9), r=(3, 20), h=(2, 8))
    s.tell("One machine makes {r} {thing} [an|per] hour. A [factory|workshop] runs {m} such machines for {h} hours.")
    s.ask("How many {thing} does it make?")
    s.step("a", "m*r", "[Together, the|The] machines make {=} {thing} an hour.")
    s.step("b", "a*h", "In {h} hours they make {=} {thing}.")


@template
def work_hours_left(s: Story) -> None:
    s.n(r=(4, 20), h=(2, 9), k=(2, 9))
    s.put(total=s.vars["r"] * (s.vars["h"] + s.vars["k"]))
    s.tell("{A} has to [paint|pack|check|fold|label] {total} {thing}.")
    s.tell("{He} does {r} [an|per] hour and has worked for {h} hours.")
    s.ask("How many more hours does {he} need?")
    s.step("a", "r*h", "{A} has done {=} {thing}.")
    s.step("b", "total-a", "There are {=} {thing} left.")
    s.step("c", "b/r", "{He} needs {=} more hours.")


@template
def practice_minutes(s: Story) -> None:
    s.n(a=(10, 60, 5), d=(2, 6), b=(10, 90, 5))
    s.tell("{A} practices [piano|guitar|chess|soccer|violin] for {a} minutes a day, {d} days a week.")
    s.tell("On the weekend {he} practices {b} minutes more.")
    s.ask("How many minutes does {he} practice in [one week|a week]?")
    s.step("c", "a*d", "That is {=} minutes on the {d} days.")
    s.step("e", "c+b", "In a week {he} practices {=} minutes.")


@template
def minutes_to_hours(s: Story) -> None:
    s.n(a=(10, 60, 5), d=(2, 30))
    s.need("(a*d) % 60 == 0")
    s.tell("{A} [walks|reads|draws|jogs|studies] for {a} minutes [every|each] day.")
    s.ask("How many hours is that in {d} days?")
    s.step("b", "a*d", "In {d} days {he} spends {=} minutes.")
    s.step("c", "b/60", "That is {=} hours.")


@template
def coins(s: Story) -> None:
    s.n(a=(4, 40), b=(2, 40), c=(2, 40))
    s.need("(a*25+b*10+c*5) % 100 == 0")
    s.tell("{A} has {a} quarters, {b} dimes and {c} nickels in [a jar|{his} pocket|a piggy bank].")
    s.ask("How many dollars is that [in total|altogether|]?")
    s.step("d", "a*25", "The quarters are {=} cents.")
    s.step("e", "b*10", "The dimes are {=} cents.")
    s.step("f", "c*5", "The nickels are {=} cents.")
    s.step("g", "d+e+f", "That is {=} cents in total.")
    s.step("h", "g/100", "So {he} has {$}.")


@template
def ribbon(s: Story) -> None:
    s.n(k=(3, 12), m=(3, 15), left=(2, 12))
    s.put(a=s.vars["k"] * s.vars["m"] + s.vars["left"])
    s.tell("{A} has a [ribbon|rope|string|wire] of {a} inches.")
    s.tell("{He} cuts off {left} inches and cuts the rest into pieces of {m} inches.")
    s.ask("How many pieces does {he} get?")
    s.step("b", "a-left", "There are {=} inches left.")
    s.step("c", "b/m", "{A} gets {=} pieces.")


@template
def half_of_the_rest(s: Story) -> None:
    s.n(a=(24, 240, 4), k=(3, 5))
    s.put(part=("", "", "", "a third", "a quarter", "a fifth")[s.vars["k"]])
    s.tell("{A} [has|starts with] {a} {thing}. {He} gives {part} of them to {B} and half of the rest to {C}.")
    s.ask("How many {thing} does {A} have left?")
    s.step("b", "a/k", "{B} gets {=} {thing}.")
    s.step("c", "a-b", "{A} has {=} {thing} left then.")
    s.step("d", "c/2", "{C} gets {=} {thing}.")
    s.step("e", "c-d", "{A} has {=} {thing} left.")


@template
def loan(s: Story) -> None:
    s.n(m=(3, 24), p=(10, 90, 5), down=(20, 200, 10))
    s.put(total=s.vars["m"] * s.vars["p"] + s.vars["down"])
    s.tell("{A} buys a [sofa|laptop|phone|fridge|desk] for ${total}.")
    s.tell("{He} pays ${down} at once and the rest in {m} equal monthly payments.")
    s.ask("How much is each payment?")
    s.step("a", "total-down", "{A} still has to pay {$}.")
    s.step("b", "a/m", "Each payment is {$}.")


@template
def party_packs(s: Story) -> None:
    s.n(g=(8, 40), k=(2, 4), m=(4, 12), p=(2, 9))
    s.need("(g*k) % m == 0")
    s.tell("{A} [plans|throws|has] a party for {g} guests.")
    s.tell("Each guest [uses|needs] {k} [cups|plates|napkins], which come in packs of {m}. A pack costs ${p}.")
    s.ask("How much does {he} pay[ for them|]?")
    s.step("a", "g*k", "The guests need {=} pieces.")
    s.step("b", "a/m", "That is {=} packs.")
    s.step("c", "b*p", "{A} pays {$}.")


@template
def library(s: Story) -> None:
    s.n(a=(100, 900, 10), b=(20, 90), c=(10, 60), d=(10, 60))
    s.tell("A library has {a} [books|magazines|films].")
    s.tell("On {day} {b} are borrowed, on {later} {c} are returned and {d} more are borrowed.")
    s.ask("How many are in the library now?")
    s.step("e", "a-b", "After {day} there are {=}.")
    s.step("f", "e+c", "After the returns there are {=}.")
    s.step("g", "f-d", "Now there are {=}.")


@template
def steps_per_day(s: Story) -> None:
    s.n(a=(1000, 4000, 100), b=(200, 1500, 100))
    s.tell("{A} walked {a} steps on {day} and {b} steps [fewer|less] on {later}.")
    s.ask("How many steps did {he} walk on the two days [together|in total]?")
    s.step("c", "a-b", "{A} walked {=} steps on {later}.")
    s.step("d", "a+c", "[Together|In total] that is {=} steps.")


@template
def letters_to_friends(s: Story) -> None:
    s.n(w=(3, 9), a=(2, 9), d=(2, 7))
    s.tell("{A} writes {a} letters to each of {w} friends [every|each] week.")
    s.ask("How many letters does {he} write in {d} weeks?")
    s.step("b", "a*w", "{A} writes {=} letters a week.")
    s.step("c", "b*d", "In {d} weeks {he} writes {=} letters.")


@template
def pet_food(s: Story) -> None:
    s.n(a=(2, 5), b=(2, 4), d=(5, 20), have=(10, 50))
    s.need("a*b*d > have + 1")
    s.tell("{A}'s [dog|cat|horse|rabbit] eats {a} cups of food {b} times a day. {A} has {have} cups at home.")
    s.ask("How many more cups does {he} need for {d} days?")
    s.step("c", "a*b", "The animal eats {=} cups a day.")
    s.step("e", "c*d", "In {d} days it eats {=} cups.")
    s.step("f", "e-have", "{A} needs {=} more cups.")


@template
def team_split(s: Story) -> None:
    s.n(a=(10, 60), b=(10, 60), k=(3, 8))
    s.need("(a+b) % k == 0")
    s.tell(
        "{a} [boys|children from one school] and {b} [girls|children from another "
        "school] go [to camp|on a trip|to a match]. They form groups of {k}."
    )
    s.ask("How many groups are there?")
    s.step("c", "a+b", "There are {=} children.")
    s.step("d", "c/k", "They form {=} groups.")


@template
def chain_of_events(s: Story) -> None:
    """Two to five random events on one heap, each worked as its own step."""
    s.n(x=(20, 90))
    s.tell("{A} [has|starts with|owns] {x} {thing}.")
    steps: list[tuple[str, str]] = []
    for i in range(s.rng.choice((2, 2, 3, 3, 4, 5))):
        then = s.one("Then ", "After that, ", "Next, ", "Later, ", "")
        kind, name = s.rng.choice(("gain", "gain", "lose", "lose", "double", "halve")), f"k{i}"
        s.put(then=then)
        if kind == "gain":
            s.n(**{name: (3, 40)})
            s.tell(f"{{then}}{{he}} [buys|finds|gets|wins] {{{name}}} more.")
            steps.append((f"x+{name}", "[Then|Now|After that] {he} has {=} {thing}."))
        elif kind == "lose":
            s.n(**{name: (3, 30)})
            s.tell(f"{{then}}{{he}} [loses|sells|gives away|gives {{B}}] {{{name}}}[ of them|].")
            steps.append((f"x-{name}", "[Then|Now|After that] {he} has {=} {thing} [left|]."))
        elif kind == "double":
            s.tell("{then}{his} {kin} doubles the number of {his} {thing}.")
            steps.append(("x*2", "After doubling, {he} has {=} {thing}."))
        else:
            s.tell("{then}{he} gives half of them to {C}.")
            steps.append(("x/2", "[{He} keeps half|Half of that is left]: {=} {thing}."))
    s.ask("How many {thing} does {A} have [now|in the end|at the end]?")
    for expr, text in steps:
        s.step("x", expr, text)
