"""The page at / in a real browser: what is typed, what is shown, and that nothing else can run in it."""

import io
import json
import re
import time

import httpx
import numpy as np
import pytest
from browser import chromium
from matplotlib.image import imread
from playwright.sync_api import Page, expect
from server_process import running_server

from specdec import Engine, SamplingParams

from marks import examples

pytestmark = pytest.mark.usefixtures("shallow_pair")
QUESTION = "Ann has 4 boxes of 6 eggs. She eats 3 eggs. How many eggs are left?"
CHUNKS = "**/v1/chat/completions"
SECONDS = 60_000  # in milliseconds, for a machine however busy


@pytest.fixture(scope="module")
def server():
    with running_server("--batch-size", "2") as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def faults():
    return []


@pytest.fixture(scope="module")
def tab(browser, faults):
    page = browser.new_page(viewport={"width": 1180, "height": 900})
    page.set_default_timeout(SECONDS)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
    yield page
    page.close()


@pytest.fixture
def page(tab, server, faults):
    """Light, reloaded in the one tab, and whatever goes wrong in it fails the test."""
    faults.clear()
    tab.unroute_all()
    tab.emulate_media(color_scheme="light")
    tab.goto("about:blank")  # what was filled in is gone
    tab.goto(f"{server.url}/")
    yield tab
    assert faults == []


def near(image, colour, by=6):
    """How many pixels have this colour, #rrggbb."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(image[:, :, :3] * 255 - wanted).max(axis=2) <= by).sum())


def figure(page: Page, run: str, name: str) -> float:
    return float(page.inner_text(f"#{run} .{name}").split()[0])


def test_nothing_is_loaded_from_elsewhere_and_only_its_own_script_may_run(server):
    answer = httpx.get(f"{server.url}/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:)?//", answer.text)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy[name])
    assert " style=" not in answer.text and " onclick=" not in answer.text  # which the policy would block
    assert "Maximum tokens" in answer.text and 'placeholder="random"' in answer.text  # plain words
    assert not re.search(r"Most tokens|drawn|counted behind|behind the first", answer.text)


@pytest.mark.slow
def test_a_typed_prompt_is_answered_twice_with_drafts_in_colour(page, tmp_path):
    expect(page.locator("#model")).to_have_text("tiny-gemma4")
    page.fill("#prompt", QUESTION[:-5])
    page.locator("#prompt").press_sequentially(QUESTION[-5:])
    page.fill("#max-tokens", str(most := examples(32, 64)))
    page.uncheck("#markdown")
    page.click("#go")
    expect(page.locator("#verdict")).to_contain_text("Texts equal: yes", timeout=SECONDS)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp") as engine:
        [out] = engine.chat(QUESTION, SamplingParams(max_new_tokens=most))
    for run in ("with", "without"):
        assert page.text_content(f"#{run} .answer") == out.text
        assert figure(page, run, "tokens") == len(out.token_ids)
        assert figure(page, run, "rate") > 0 and figure(page, run, "first") > 0
    assert page.inner_text("#with .length") == f"{out.stats.acceptance_length:.2f}"
    assert page.locator("#with mark").count() > 2 and page.locator("#without .answer mark").count() == 0
    drafted = "".join(page.locator("#with .answer mark").all_text_contents())
    assert len(out.text) / 2 < len(drafted) < len(out.text)
    shares = [f"{round(100 * share)} %" for share in out.stats.accepted_per_position]
    assert page.locator("#with .bars li > span:last-child").all_text_contents() == shares
    assert float(re.search(r"Speedup: ([\d.]+)×", page.inner_text("#verdict"))[1]) > 0
    image = imread(io.BytesIO(page.screenshot(full_page=True)))
    assert near(image, "#2f9e5c") > 2000  # bars
    assert near(image, "#dff5e6") > 2000  # behind accepted drafts
    page.emulate_media(color_scheme="dark")
    dark = imread(io.BytesIO(page.screenshot(full_page=True)))
    assert near(dark, "#4cbf7c") > 2000 and near(dark, "#173524") > 2000
    assert dark[:, :, :3].mean() < 0.3 < 0.8 < image[:, :, :3].mean()


def test_the_page_shows_rounds_by_draft_depth_and_why_there_are_no_drafts(page):
    """It said "position 2: 4 %" of a drafter that is right nine times in ten, and nothing where there are no drafts."""
    figures = {"rounds": 90, "drafted_rounds": 40, "acceptance_length": 1.98, "drafts_off": "none pays"}
    figures |= {"accepted_per_position": [0.9, 0.8], "drafted_counts": [40, 5]}
    page.evaluate("figures => { window.run = new Run('With speculation', true); run.showDrafts(figures); }", figures)
    labels, shares = (page.locator(f"#with .bars li > span:{which}-child") for which in ("first", "last"))
    assert labels.all_text_contents() == ["position 1, 40 rounds", "position 2, 5 rounds"]
    assert shares.all_text_contents() == ["90 %", "80 %"]
    assert page.inner_text("#with .off") == "Most rounds had no draft: none pays."
    page.evaluate("figures => run.showDrafts(figures)", figures | {"drafted_rounds": 0})
    assert page.inner_text("#with .off") == "No drafts were made: none pays."
    page.evaluate("figures => run.showDrafts(figures)", figures | {"drafted_rounds": 60})
    assert page.is_hidden("#with .off")
    assert page.evaluate("slower({...run, tokens: 180, drafts: run.drafts}, 0.5)").endswith(
        "brought 2.00 tokens and took 4.00 times as long as a plain one."
    )
    assert page.evaluate("slower(run, 1.5)") == ""


@pytest.mark.deep
def test_stop_aborts_the_request(page, server):
    page.fill("#max-tokens", "3800")
    page.fill("#temperature", "5")  # noise that goes on for thousands of tokens
    page.fill("#seed", "1")
    page.click("#go")
    expect(page.locator("#with .rate")).to_contain_text(".", timeout=SECONDS)
    assert page.is_disabled("#go")
    page.click("#stop")
    expect(page.locator("#status")).to_have_text("Stopped.", timeout=SECONDS)
    assert 0 < figure(page, "with", "tokens") < 3800
    assert page.locator("#without").count() == 0 and page.is_hidden("#verdict") and page.is_hidden("#fault")
    idle, deadline = re.compile(r"^vllm:num_requests_running\S* 0(\.0)?$", re.MULTILINE), time.monotonic() + 30
    while not idle.search(httpx.get(f"{server.url}/metrics").text):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.deep
def test_a_refusal_is_said_in_words(page):
    page.fill("#max-tokens", "999999")
    page.click("#go")
    expect(page.locator("#fault")).to_contain_text("more than max_model_len=4096", timeout=SECONDS)
    assert page.is_enabled("#go") and page.locator(".run").count() == 0
    page.route(CHUNKS, lambda route: route.abort())
    page.fill("#max-tokens", "8")
    page.click("#go")
    expect(page.locator("#fault")).to_contain_text("The server cannot be reached", timeout=SECONDS)


def chunks(text, drafted=None):
    """The events of an answer that no server gave."""
    usage = {"completion_tokens": len(text)}
    said = {"index": 0, "delta": {"content": text}} | ({} if drafted is None else {"drafted": drafted})
    return f"data: {json.dumps({'choices': [said], 'usage': usage})}\n\ndata: [DONE]\n\n"


@pytest.mark.slow
def test_text_is_text_whatever_it_says_and_unequal_texts_are_told(page):
    markup = "<img src=x onerror=\"document.title='run'\"> <b>bold</b> &amp;\n<script>document.title='run'</script>"
    answers = iter([chunks(markup, [[markup[:9], False], [markup[9:], True]]), chunks("other")])
    page.route(CHUNKS, lambda route: route.fulfill(body=next(answers), content_type="text/event-stream"))
    page.click("#go")
    expect(page.locator("#verdict")).to_contain_text("Texts equal: no", timeout=SECONDS)
    assert page.text_content("#with .answer") == markup
    assert page.locator(".answer img, .answer b, .answer script").count() == 0 and page.title() == "specdec"


MARKDOWN = """# Plan
Of 3*12 and 4*9, *one* is **36**; see [it](https://example.org/a) or [this](javascript:alert(1)), ~~not~~ `a*b`.

- one
  - `two`
- three *and

1) first

2) second
> quoted
> more

| a | b |
|---|:-:|
| 1 | **2** |

```python
print("<b>")

# no heading
```
---
snake_case_name \\*plain\\*"""
HTML = (
    "<h1>Plan</h1><p>Of 3*12 and 4*9, <em>one</em> is <strong>36</strong>; see "
    '<a href="https://example.org/a" target="_blank" rel="noopener noreferrer">it</a> or [this](javascript:alert(1)), '
    "<del>not</del> <code>a*b</code>.</p>"
    "<ul><li><p>one</p><ul><li><p><code>two</code></p></li></ul></li><li><p>three *and</p></li></ul>"
    '<ol start="1"><li><p>first</p></li><li><p>second</p></li></ol>'
    "<blockquote><p>quoted\nmore</p></blockquote>"
    "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
    "<tbody><tr><td>1</td><td><strong>2</strong></td></tr></tbody></table>"
    '<pre data-language="python"><code>print("&lt;b&gt;")\n\n# no heading</code></pre><hr>'
    "<p>snake_case_name *plain*</p>"
)


@pytest.fixture
def answered(page):
    """answered(pieces, drafted=False): an answer in these pieces is shown; what the page sent is in answered.bodies."""
    bodies = []

    def show(pieces, drafted=False):
        events = "".join(chunks(piece, [[piece, drafted]]).partition("data: [DONE]")[0] for piece in pieces)
        said = f"{events}data: [DONE]\n\n"

        def answer(route):
            bodies.append(route.request.post_data_json)
            route.fulfill(body=said, content_type="text/event-stream")

        page.unroute(CHUNKS)
        page.route(CHUNKS, answer)
        page.click("#go")
        expect(page.locator("#status")).to_contain_text("Done.", timeout=SECONDS)

    show.bodies = bodies
    page.uncheck("#compare")
    return show


@pytest.mark.slow
def test_markdown_is_shown_and_copied_as_it_was_written(page, answered):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answered([MARKDOWN])
    assert page.inner_html("#with .answer") == HTML
    page.click("#with .copy")
    expect(page.locator("#with .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN
    page.uncheck("#markdown")
    assert page.text_content("#with .answer") == MARKDOWN
    page.check("#markdown")
    assert page.inner_html("#with .answer") == HTML


@pytest.mark.slow
def test_markdown_that_streams_is_shown_as_a_whole_one(page):
    """Whatever the cuts, with a frame shown after each: what settled early would be another block."""
    script = """([text, cuts]) => {
        const show = (pieces) => {
            const answer = new Answer(document.createElement("div"), document.createElement("button"));
            for (const piece of pieces) {
                answer.add(piece, false);
                answer.show();
            }
            return answer.node.innerHTML;
        };
        const pieces = (cut) => cut.map((from, i) => text.slice(from, cut[i + 1] ?? text.length));
        const whole = show([text]);
        return cuts.map((cut) => show(pieces(cut)) === whole);
    }"""
    rng = np.random.default_rng(0)
    text = f"{MARKDOWN}\n--x\n\n- a\n\n\nb\n- c\n\n  d\n{MARKDOWN}"
    cuts = [[0, *sorted(rng.choice(range(1, len(text)), size, replace=False).tolist())] for size in (3, 40, 400) * 4]
    assert page.evaluate(script, [text, cuts]) == [True] * len(cuts)


@pytest.mark.slow
def test_markdown_brings_no_markup_and_no_script_of_its_own(page, answered):
    hostile = (
        "**<img src=x onerror=\"document.title='run'\">**\n\n| <b>a</b> | b |\n|-|-|\n| <script>1</script> | c |\n\n"
        "[x](javascript:document.title='run') [y](data:text/html,z) [z](https://a\"onclick=1) ![i](https://a/i.png)\n"
        "```<i>\n</code></pre><iframe src=x>\n```\n" + "> " * 5000 + "deep " + "*a **" * 2000 + "[" * 5000 + "`" * 3001
    )
    answered([hostile], drafted=True)
    allowed = {"MARK", "P", "STRONG", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "A", "PRE", "CODE", "BLOCKQUOTE"}
    tags = page.eval_on_selector_all("#with .answer *", "nodes => [...new Set(nodes.map((node) => node.tagName))]")
    assert set(tags) <= allowed | {"EM"}
    attributes = "nodes => [...new Set(nodes.flatMap((node) => node.getAttributeNames()))]"
    names = page.eval_on_selector_all("#with .answer *", attributes)
    assert set(names) <= {"href", "target", "rel", "data-language"}
    links = page.eval_on_selector_all("#with .answer a", "nodes => nodes.map((node) => node.protocol)")
    assert set(links) == {"https:"} and page.title() == "specdec"


@pytest.mark.slow
def test_a_conversation_is_kept_and_sent(page, answered):
    page.fill("#system", "Be brief.")
    for question, answer in (("one?", "**1**"), ("two?", "2")):
        page.fill("#prompt", question)
        answered([answer])
        assert page.input_value("#prompt") == "" and page.inner_text("#newest .question") == question
    said = [("system", "Be brief."), ("user", "one?"), ("assistant", "**1**"), ("user", "two?")]
    assert [(each["role"], each["content"]) for each in answered.bodies[1]["messages"]] == said
    assert page.locator("#turns .question").all_inner_texts() == ["one?"]
    assert page.inner_html("#turns .answer") == "<p><strong>1</strong></p>"
    page.click("#new")
    assert page.locator("#turns *").count() == 0 and page.is_hidden("#newest") and page.locator(".run").count() == 0
    page.fill("#prompt", "three?")
    answered(["3"])
    assert [each["content"] for each in answered.bodies[2]["messages"]] == ["Be brief.", "three?"]


@pytest.mark.slow
def test_a_page_asks_for_a_key_if_one_is_needed(browser, server):
    page = browser.new_page()
    page.set_default_timeout(SECONDS)
    wrong = json.dumps({"error": {"message": "no API key was given; send one"}})

    def guarded(route):
        if route.request.headers.get("authorization") == "Bearer right":
            route.continue_()
        else:
            route.fulfill(status=401, body=wrong, content_type="application/json")

    page.route("**/v1/**", guarded)
    page.goto(f"{server.url}/")
    expect(page.locator("#key")).to_be_visible(timeout=SECONDS)
    page.fill("#max-tokens", "8")
    page.click("#go")
    expect(page.locator("#fault")).to_contain_text("No API key was given", timeout=SECONDS)
    page.fill("#key", "right")
    page.uncheck("#compare")
    page.click("#go")
    expect(page.locator("#status")).to_have_text("Done.", timeout=SECONDS)
    assert page.locator(".run").count() == 1 and page.is_hidden("#fault") and page.is_hidden("#verdict")
    page.close()
