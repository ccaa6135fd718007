"""More templates of the word problems: shapes, scores, groups, rates, and random chains of events.

Same rules as `word_problem_templates`; a second file only so that each stays short.
"""

from __future__ import annotations

from word_problem_story import Story, template


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
