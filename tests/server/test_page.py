"""The page at /: what it may do, and a browser with it, where there are playwright and Chromium."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from marks import others_full
from serving import FakeAnswer, FakeEngine, ask, fake_service, serving, wait_for
from test_server import FakeModel, fakes

from infer.kernels.errors import InferError, NoChatTemplateError
from infer.llm import Prompt
from infer.results import Chunk, Result
from infer.sampling import SamplingParams
from infer.server.service import Host, ServerOptions

__all__ = ["fakes"]  # a fixture

CHAT = "**/v1/chat/completions"


class ScriptedAnswer(FakeAnswer):
    """A text in pieces of some characters; without an end, again and again."""

    engine: ScriptedEngine

    def __init__(self, engine: ScriptedEngine, text: str) -> None:
        super().__init__(engine)
        pieces = re.findall(r"(?s).{1,5}", text)
        texts = itertools.cycle(pieces) if engine.endless else pieces
        thoughts = [Chunk("", 0, reasoning=thought) for thought in engine.thoughts]
        chunks = (Chunk(piece, count) for count, piece in enumerate(texts, 1))
        self.pieces = itertools.chain(thoughts, chunks)
        self.result = Result(text, [*range(len(pieces))], "stop", None, prompt_tokens=3)

    async def __anext__(self) -> Chunk:
        await asyncio.sleep(0.01 if self.engine.endless else 0)
        return await super().__anext__()


class ScriptedEngine(FakeEngine):
    """Gives the answers of a list, one after the other, and then its last one; before each the
    same thoughts."""

    context, slots = 8192, 4

    def __init__(self, *answers: str, name: str = "tiny") -> None:
        super().__init__()
        self.name, self.answers = name, [*answers]
        self.endless = self.without_template = False
        self.thoughts: Sequence[str] = ()
        self.prompts: list[Any] = []
        self.template_args: list[Mapping[str, Any]] = []

    async def encode(
        self,
        prompt: Prompt,
        template_args: Mapping[str, Any],
        add_special_tokens: bool = True,
        most: int | None = None,
        counts: bool = False,
    ) -> list[int]:
        if self.without_template and not isinstance(prompt, str):
            raise NoChatTemplateError("This model has no chat template.")
        self.prompts.append(prompt)
        self.template_args.append(template_args)
        return [1, 2, 3]

    def answer(self) -> ScriptedAnswer:
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return ScriptedAnswer(self, text)


# Files that are served


def test_the_page_is_open_and_runs_nothing_but_its_own_script() -> None:
    service = fake_service(ScriptedEngine("x"), api_keys=["secret"])
    with serving(service) as address:
        response, data = ask(address, "/")
        assert ask(address, "/v1/models")[0].status == 401
    assert (response.status, response.getheader("content-type")) == (
        200,
        "text/html; charset=utf-8",
    )
    policy = dict(
        part.strip().split(" ", 1)
        for part in (response.getheader("content-security-policy") or "").split(";")
    )
    for tag in ("script", "style"):
        contents = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), data, re.S)
        digests = [base64.b64encode(hashlib.sha256(each).digest()).decode() for each in contents]
        assert contents
        assert policy[f"{tag}-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert policy["require-trusted-types-for"] == "'script'"
    assert response.getheader("x-content-type-options") == "nosniff"
    text = re.sub(r"(?s)<script>.*?</script>", "", data.decode(), count=1)  # the libraries
    assert not re.findall(
        r"(?i)innerHTML|insertAdjacent|document\.write|\beval\b|\bFunction\(", text
    )
    assert not re.findall(r"""(?i)\s(?:style|on\w+|src)=["']""", text)
    hrefs = re.findall(r"""href=["']([^"']*)""", text)
    assert hrefs
    assert all(href.startswith(("#", "data:image/svg+xml,")) for href in hrefs)


def test_the_page_is_one_request_and_cached() -> None:
    with serving(fake_service(ScriptedEngine("x"))) as address:
        response, data = ask(address, "/")
        tag = response.getheader("etag") or ""
        assert len(data) < 500_000
        again, nothing = ask(address, "/", headers={"If-None-Match": tag})
        assert (again.status, nothing, again.getheader("etag")) == (304, b"", tag)
        assert ask(address, "/", headers={"If-None-Match": '"old"'})[1] == data
        packed, body = ask(address, "/", headers={"Accept-Encoding": "br, gzip"})
        assert packed.getheader("content-encoding") == "gzip"
        assert gzip.decompress(body) == data


def test_a_model_without_a_chat_template_is_told_by_a_code() -> None:
    """The server has an error code for it, by which the page knows such a model."""
    engine = ScriptedEngine("x")
    engine.without_template = True
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with serving(fake_service(engine)) as address:
        response, data = ask(address, "/v1/chat/completions", body)
    assert (response.status, json.loads(data)["error"]["code"]) == (400, "no_chat_template")


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("There is no Chromium.")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens the page on an engine, and waits until it knows the models. Nothing may go wrong in it,
    nor anything be asked of another server. init: a script that runs before the page's own."""
    wrong: list[str] = []
    contexts, servers = [], []

    def open_one(
        served: ScriptedEngine | Host,
        api_keys: Sequence[str] = (),
        init: str = "",
        **context: Any,
    ) -> Any:
        if isinstance(served, ScriptedEngine):
            served = fake_service(served, api_keys=api_keys, keepalive=600)
        server = serving(served)
        address = server.__enter__()
        servers.append(server)
        contexts.append(browser.new_context(**context))
        contexts[-1].add_init_script(init)
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))

        def told(message: Any) -> None:
            if message.type == "error" and "Failed to load resource" not in message.text:
                wrong.append(message.text)

        def requested(request: Any) -> None:
            if not request.url.startswith((address, "data:")):
                wrong.append(f"asked for {request.url}")

        page.on("console", told)
        page.on("request", requested)
        page.goto(address)
        until(page, "app.models.length || app.serverError")
        return page

    yield open_one
    for context in contexts:
        context.close()
    for server in servers:
        server.__exit__(None, None, None)
    assert not wrong


def until(page: Any, condition: str) -> None:
    """Wait for a condition in JavaScript; wait_for_function would need unsafe-eval."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    pytest.fail(f"never came true: {condition}")


def say(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.keyboard.press("Enter")


def ended(page: Any) -> None:
    page.wait_for_selector("#send[aria-label=Send]")


def last_answer(page: Any) -> str:
    text: str = page.inner_text("article:last-child .md")
    return text


def stored(page: Any) -> list[dict[str, Any]]:
    """The conversations that the browser keeps."""
    chats: list[dict[str, Any]] = page.evaluate(
        """() => new Promise((done) => {
            const asked = indexedDB.open("infer");
            asked.onsuccess = () => {
                const all = asked.result.transaction("chats").objectStore("chats").getAll();
                all.onsuccess = () => { asked.result.close(); done(all.result); };
            };
        })"""
    )
    return chats


def titles(page: Any) -> list[str]:
    """Returns the titles of the conversations in the list."""
    found: list[str] = page.evaluate(
        "[...document.querySelectorAll('#chats .open')].map(e => e.firstChild.data)"
    )
    return found


def test_a_conversation(open_page: Open) -> None:
    engine = ScriptedEngine("Hello **you**.", "Another answer.", "A third one.")
    page = open_page(engine)
    assert page.inner_text(".empty h2") == "tiny"
    say(page, "Hi")
    ended(page)
    assert page.inner_text("article.user .said") == "Hi"
    assert page.inner_text("article:last-child strong") == "you"
    stats = page.inner_text(".stats")
    assert re.fullmatch(r"3 tokens( · [\d.,]+ tokens/s)? · first after [\d.]+ s", stats)
    assert page.title() == "Hi · infer"

    page.keyboard.type("And now?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Well?")
    page.keyboard.press("Enter")
    ended(page)
    assert last_answer(page) == "Another answer."
    assert engine.prompts[1] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello **you**."},
        {"role": "user", "content": "And now?\nWell?"},
    ]

    page.click("text=Regenerate")
    ended(page)
    until(page, "document.querySelector('article:last-child').innerText.includes('third')")
    assert engine.prompts[2] == engine.prompts[1]
    assert page.locator("article").count() == 4

    page.reload()
    page.wait_for_selector("article")
    assert page.locator("article").count() == 4
    assert last_answer(page) == "A third one."
    say(page, "Once more")
    ended(page)
    assert len(engine.prompts[3]) == 5


def test_the_modules_import_what_they_need(browser: Any) -> None:
    """They are sent as one script, in which nothing needs to be imported: here a browser takes them
    as the modules that they are."""
    folder = files("infer.server").joinpath("page")
    context = browser.new_context()
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))

    def module(route: Any) -> None:
        name = route.request.url.rsplit("/", 1)[1]
        text = folder.joinpath(name).read_text(encoding="utf-8")
        route.fulfill(body=text, content_type="text/javascript")

    text = folder.joinpath("page.html").read_text(encoding="utf-8")
    module_script = '<script type="module">import "./main.js";'
    text = text.replace("<script>\n{{ script }}", module_script).replace("{{ entities }}", "{}")
    names = ("temml", "prism")
    libraries = (folder.joinpath(f"vendor/{name}.min.js").read_text("utf-8") for name in names)
    text = text.replace("{{ libraries }}", "".join(libraries).replace("</script", ""))
    with serving(fake_service(ScriptedEngine("*a* `b`"))) as address:
        page.route("**/*.js", module)
        page.route(f"{address}/", lambda route: route.fulfill(body=text, content_type="text/html"))
        page.goto(address)
        page.wait_for_selector(".empty h2:text('tiny')")
        say(page, "Hi")
        page.wait_for_selector("article em")
        ended(page)
    context.close()
    assert not wrong


def shown(page: Any) -> list[str]:
    """The texts of the messages that are shown."""
    texts: list[str] = page.evaluate(
        "[...document.querySelectorAll('.said, article .md:not([hidden])')].map(e => e.innerText)"
    )
    return texts


def of_message(page: Any, number: int, label: str) -> Any:
    """A button of a message."""
    return page.locator("article").nth(number).get_by_role("button", name=label, exact=True)


def test_earlier_answers_are_kept(open_page: Open) -> None:
    engine = ScriptedEngine("One.", "Two.", "Three.", "Four.")
    page = open_page(engine)
    say(page, "Hi")
    ended(page)
    for _ in range(2):
        of_message(page, 1, "Regenerate").click()
        ended(page)
    assert shown(page) == ["Hi", "Three."]
    assert "3 of 3" in page.inner_text(".versions")
    of_message(page, 1, "Previous version").click()
    assert shown(page) == ["Hi", "Two."]
    assert page.inner_text("#spoken") == "Version 2 of 3."
    assert page.evaluate("document.activeElement.title") == "Previous version"
    page.keyboard.press("Enter")
    assert shown(page) == ["Hi", "One."]
    assert of_message(page, 1, "Previous version").is_disabled()
    assert page.evaluate("document.activeElement.title") == "Next version"
    page.keyboard.press("Enter")
    say(page, "Go on")
    ended(page)
    assert shown(page) == ["Hi", "Two.", "Go on", "Four."]
    assert [each["content"] for each in engine.prompts[3]] == ["Hi", "Two.", "Go on"]
    of_message(page, 1, "Next version").click()
    assert shown(page) == ["Hi", "Three."]
    page.reload()
    page.wait_for_selector(".versions")
    assert shown(page) == ["Hi", "Three."]
    of_message(page, 1, "Previous version").click()
    assert shown(page) == ["Hi", "Two.", "Go on", "Four."]


@pytest.mark.full
def test_a_message_is_edited(open_page: Open) -> None:
    """Any of the user's: what came after it stays with the old version."""
    engine = ScriptedEngine("One.", "Two.", "Three.")
    page = open_page(engine)
    for text in ("first", "second"):
        say(page, text)
        ended(page)
    of_message(page, 0, "Edit").click()
    page.keyboard.press("Escape")
    assert page.locator(".editor").count() == 0
    of_message(page, 0, "Edit").click()
    page.fill(".editor textarea", "changed")
    page.keyboard.press("Enter")
    ended(page)
    assert shown(page) == ["changed", "Three."]
    assert [message["content"] for message in engine.prompts[2]] == ["changed"]
    of_message(page, 0, "Previous version").click()
    assert shown(page) == ["first", "One.", "second", "Two."]


def test_an_answer_is_edited_and_goes_on(open_page: Open) -> None:
    engine = ScriptedEngine("One two.", " three.", "Yes.")
    page = open_page(engine)
    say(page, "Count")
    ended(page)
    of_message(page, 1, "Edit").click()
    page.fill(".editor textarea", "One, two,")
    page.keyboard.press("Tab")  # over Cancel
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert shown(page) == ["Count", "One, two,"]
    assert "Edited" in page.inner_text("article:last-child .foot")
    of_message(page, 1, "Continue").click()
    ended(page)
    assert shown(page) == ["Count", "One, two, three."]
    assert engine.prompts[1][-1] == {"role": "assistant", "content": "One, two,"}
    assert engine.template_args[1] == {"continue_final_message": True}
    say(page, "More")
    ended(page)
    assert engine.prompts[2][1] == {"role": "assistant", "content": "One, two, three."}
    assert engine.template_args[2] == {}
    of_message(page, 1, "Previous version").click()
    assert shown(page) == ["Count", "One two."]


@pytest.mark.full
def test_an_answer_that_broke_off_goes_on(open_page: Open) -> None:
    engine = ScriptedEngine(" whole.")
    page = open_page(engine)
    page.route(CHAT, lambda route: route.fulfill(**sse({"content": "Half, then"}, end="")))
    say(page, "Hi")
    page.wait_for_selector(".failed")
    page.unroute(CHAT)
    of_message(page, 1, "Continue").click()
    ended(page)
    assert shown(page) == ["Hi", "Half, then whole."]
    assert page.locator(".failed, .note, .versions").count() == 0


NUMBERS = {
    "Temperature": 0.7,
    "Top p": 0.9,
    "Max tokens": 50,
    "Seed": 7,
    "Top k": 40,
    "Min p": 0.05,
    "Repetition penalty": 1.1,
    "Presence penalty": 0.5,
    "Frequency penalty": -0.25,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}


@pytest.mark.full
def test_settings_are_sent(open_page: Open) -> None:
    engine = ScriptedEngine("x")
    page = open_page(engine)
    page.click("#open-settings")
    page.click("text=More sampling options")
    page.get_by_label("System prompt").fill("Be brief.")
    for name, value in NUMBERS.items():
        page.get_by_label(name).fill(str(value))
    page.get_by_label("Top p").fill("9")  # is out of range: what was there before counts
    page.get_by_label("Stop strings").fill("END\n\n \\n\\n")
    schema = page.get_by_label("JSON schema")
    schema.fill(json.dumps(SCHEMA))
    page.get_by_label("Other parameters").fill('{"logit_bias": {"3": -1}, "temperature": 9}')
    for text, told in (("{", "This is no JSON: "), ("[1]", "This is no JSON object.")):
        schema.fill(text)
        assert told in page.inner_text("#schema-error")
    page.keyboard.press("Escape")
    assert page.get_attribute("#open-settings", "title") == "Settings, some of which are set"
    page.select_option("#model", "sql")
    say(page, "Hi")
    ended(page)
    prompt, (_, params, adapter) = engine.prompts[0], engine.asked[0]
    assert prompt[0] == {"role": "system", "content": "Be brief."}
    given = {name.lower().replace(" ", "_"): value for name, value in NUMBERS.items()}
    assert params == SamplingParams(
        **given, stop=("END", " \n\n"), schema=SCHEMA, logit_bias={3: -1}
    )
    assert adapter == "sql"
    page.reload()
    page.click("#open-settings")
    assert page.get_by_label("Seed").input_value() == "7"
    assert page.get_by_label("Min p").is_visible()
    assert json.loads(schema.input_value()) == SCHEMA
    assert page.inner_text("#schema-error") == ""
    for name in ("JSON schema", "Other parameters", "Stop strings", *NUMBERS):
        page.get_by_label(name).fill("")
    page.keyboard.press("Escape")
    say(page, "Hi")
    ended(page)
    assert engine.asked[1][1] == SamplingParams()
    page.click("#open-settings")
    page.get_by_label("System prompt").fill("")
    page.keyboard.press("Escape")
    assert page.get_attribute("#open-settings", "title") == "Settings"


THINKING = {
    "The model’s own": {},
    "Off": {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
    "On": {"enable_thinking": True, "thinking": True},
    "On, low effort": {"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
}


@pytest.mark.full
def test_thinking_is_asked_for(open_page: Open) -> None:
    engine = ScriptedEngine("x")
    page = open_page(engine)
    for name in THINKING:
        page.click("#open-settings")
        page.get_by_label("Thinking").select_option(name)
        page.keyboard.press("Escape")
        say(page, "Hi")
        ended(page)
    assert engine.template_args == [*THINKING.values()]


@pytest.mark.full
def test_escape_stops_an_answer(open_page: Open) -> None:
    engine = ScriptedEngine("word ")
    engine.endless = True
    page = open_page(engine)
    say(page, "Go on")
    until(page, "document.querySelector('article:last-child').innerText.length > 30")
    assert page.get_attribute("#send", "aria-label") == "Stop"
    page.keyboard.type("typed meanwhile")
    page.keyboard.press("Enter")  # does nothing yet
    page.keyboard.press("Escape")
    ended(page)
    assert page.inner_text(".note") == "Stopped."
    assert page.inner_text(".stats").startswith("about ")
    assert page.input_value("#text") == "typed meanwhile"
    kept = stored(page)[0]["messages"]
    assert len(kept) == 2
    assert kept[1]["content"].startswith("word word ")
    assert len(engine.asked) == 1
    wait_for(lambda: engine.closed == 1)


@pytest.mark.full
def test_what_came_before_a_reload_is_kept(open_page: Open) -> None:
    engine = ScriptedEngine("word ")
    engine.endless = True
    page = open_page(engine)
    say(page, "Go on")
    until(page, "document.querySelector('article:last-child').innerText.length > 30")
    page.reload()
    page.wait_for_selector(".note")
    assert page.inner_text(".note") == "Interrupted."
    assert last_answer(page).startswith("word word")


HOSTILE = """\
<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">
<svg onload="window.hacked = 1">
<iframe src="javascript:window.hacked = 1"></iframe>

![picture](https://elsewhere.invalid/a.png) [a](javascript:window.hacked=1)
[b](  data:text/html,<script>1</script>) [c](JaVaScRiPt:window.hacked=1)
[d](https://elsewhere.invalid/"onmouseover="window.hacked=1) <a href="javascript:1">e</a>
[fine](https://elsewhere.invalid/page) <javascript:window.hacked=1> [v](vbscript:1)

```<script>window.hacked=1</script>
</code></pre><script>window.hacked = 1</script>
```

| <script>window.hacked=1</script> | `<b>` |
| --- | --- |
| <img src=x onerror=window.hacked=1> | x |
"""


def test_nothing_of_an_answer_runs(open_page: Open) -> None:
    engine = ScriptedEngine(HOSTILE, name="<script>window.hacked=1</script>")
    page = open_page(engine)
    say(page, "<img src=x onerror=window.hacked=1>")
    ended(page)
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.evaluate("window.hacked") is None
    thread = page.locator("#thread")
    assert thread.locator("script, img, iframe, svg, object, embed, form, style, link").count() == 0
    assert "<script>window.hacked = 1</script>" in last_answer(page)
    links = thread.locator("a")
    for i in range(links.count()):
        assert links.nth(i).get_attribute("href").startswith("https://elsewhere.invalid/")
        assert links.nth(i).get_attribute("rel") == "noopener noreferrer nofollow"
        assert links.nth(i).evaluate("a => a.getAttributeNames().sort()") == [
            "href",
            "rel",
            "target",
        ]
    assert links.count() == 3


LONG = {
    "stars": "*" * 5000,
    "brackets": "[" * 5000,
    "backticks": "`" + "`a" * 3000,
    "quotes": ">" * 5000,
    "items": "- " * 3000,
    "cells": "a|" * 3000 + "\n" + "-|" * 3000,
    "formulas": "\\(" * 4000,
    "emphasis": "_a *b " * 2000,
    "spaces": "# " + " " * 9000 + "x",
    "breaks": "<br " * 3000,
    "links": "[a](" * 3000,
    "nested links": "[" * 3000 + "a" + "](b)" * 3000,
    "nested emphasis": "*a **b " * 1500 + "c* d** " * 1500,
    "titles": '[a](b "' * 3000,
    "entities": "&a" * 3000,
    "dollars": "$a" * 5000,
    "open formulas": "$$a\n\n" * 2000,
    "formulas in lines": "$a_1$ " * 1000,
    "deep formulas": "$" + "{" * 1900 + "x" + "}" * 1900 + "$ $" + "\\sqrt" * 700 + "x$",
    "macros": "$\\def\\a{\\b\\b}\\def\\b{\\a\\a}\\a$",
    "code": "```css\n" + (", " * 30 + "\n") * 500 + "```\n",
    "long lines of code": "```yaml\n" + ":" * 20000,
}


@pytest.mark.full
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_no_answer_takes_the_page_long(browser: Any, markdown: Any, text: str) -> None:
    """Against what would be quadratic or worse, or nest without end: the limit is the browser's."""
    assert len(markdown(text)) >= 0


@pytest.fixture(scope="module")
def markdown(browser: Any) -> Iterator[Callable[[str], str]]:
    """The page's own rendering, as HTML with nothing but what CommonMark's has."""
    with serving(fake_service(ScriptedEngine("x"))) as address:
        page = browser.new_page()
        page.goto(address)

        def render(source: str) -> str:
            html: str = page.evaluate(
                """source => {
                    const shown = new Markdown();
                    shown.show(source);
                    for (const code of shown.node.querySelectorAll("figure")) {
                        const language = code.querySelector("figcaption span").textContent;
                        const pre = code.querySelector("pre");
                        const inner = pre.firstChild;
                        inner.textContent += "\\n";
                        if (language !== "Code") inner.className = "language-" + language;
                        code.replaceWith(pre);
                    }
                    for (const table of shown.node.querySelectorAll(".table"))
                        table.replaceWith(table.firstChild);
                    for (const node of shown.node.querySelectorAll("*"))
                        for (const name of node.getAttributeNames())
                            if (!["href", "start"].includes(name) && node.localName !== "code")
                                node.removeAttribute(name);
                    return shown.node.innerHTML;
                }""",
                source,
            )
            return html

        yield render
        page.close()


SAMPLES = {
    "paragraphs": "One\ntwo.\n\nThree  \nfour\\\nfive.",
    "headings": "# One\n\n## Two ##\ntext\n### *Three*\n\n####### seven",
    "emphasis": "*a* **b** ***c*** _d_ __e__ a_b_c 2 * 3 * 4 ~~no~~ \\*x\\*",
    "emphasis in emphasis": "**a *b* c** *a **b** c* **a *b***",
    "code": "`a` ``b ` c`` ` d ` `<b>`\n\n```python\nif a:\n    b\n\n\nc\n```\n\n~~~\nx\n~~~",
    "open code": "```js\nlet a\n",
    "lists": "- a\n- b\n  - c\n  - d\n- e\n\n1. one\n2. two\n\n7. seven",
    "items of paragraphs": "- a\n\n  b\n- c\n\n  ```\n  d\n  ```",
    "quotes": "> a\n> b\n>\n> - c\n> > d\n\ne",
    "rules": "a\n\n---\n\nb\n\n***",
    "tables": "| a | b |\n| --- | --: |\n| 1 | `x` |\n| **2** | y |\n\nend",
    "links": '[a](https://b.example/c_d_e) [f *g*](<https://h.example> "i") <script>',
    "entities": 'a < b & c > d "e" &lt;b&gt; &amp;lt; `&lt;` &notit; &no; &#42;a&#42; '
    "&#x1F600; &ngE; &#0; &#xD800;",
    "entities in code and links": "``` f&ouml;\\_\n&lt;\n```\n\n[a](https://b.example/?c&amp;d)",
    "autolinks": "<https://a.example/b?c&d=*> <me+x@a.example> < a@b> <a b>",
    "targets of links": "[a](<https://b.example/c d>) [b](https://b.example/(c(d))) "
    "[c](https://b.example/\\)\\* (t)) [d](https://b.example/e\n'f \"g\"') [h](i j) [k](<l",
    "texts of links": "[a [b]](https://c.example/d) [e `](f)` [*g*](https://h.example/i) "
    "*[j*](https://k.example/l) [m [n](https://o.example/p)](q)",
    "flanks": 'a*"b"* *(*c*)* __d, __e__, f__ 5*6*7 *g*h a_b_ *$*i **j.** \u00a0*\u00a0k*',
    "runs": "***a** b* ***c* d** **e* *f** ***g** ****h**** *i **j *k* l** m* **n*o**",
    "a list after text": "Some:\n- a\n- b\n\nand\n\n* c",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_markdown_is_that_of_commonmark(markdown: Callable[[str], str], name: str) -> None:
    """HTML is that of markdown-it, which comes with rich, with tables."""
    reference = pytest.importorskip("markdown_it").MarkdownIt("commonmark", {"html": False})
    reference.enable("table").enable("strikethrough")
    expected = reference.render(SAMPLES[name])
    expected = re.sub(
        r' (?:style|title)="[^"]*"|<(/?)s>',
        lambda m: f"<{m[1]}del>" if m[1] is not None else "",
        expected,
    )

    def tidy(html: str) -> str:
        html = (
            html.replace("&quot;", '"')
            .replace("&nbsp;", "\u00a0")
            .replace("<br />", "<br>")
            .replace("<hr />", "<hr>")
        )
        html = re.sub(r'href="(https://[^/"]+)"', r'href="\1/"', html)
        html = re.sub(
            r"\s*(</?(?:p|li|ul|ol|h\d|blockquote|pre|table|thead|tbody|tr|th|td|hr|br)\b[^>]*>)\s*",
            r"\1",
            html,
        )
        return html.strip()

    assert tidy(markdown(SAMPLES[name])) == tidy(expected)


def test_markdown_that_is_not_of_commonmark(markdown: Callable[[str], str]) -> None:
    """Addresses that are not safe to open are texts, whatever is in them; an image is a link, but
    for one in a link; a bare address is a link; a word of Chinese ends without a space."""
    cases = {
        "[a](data:text/html,<b>) [c](javascript:d)": "a c",
        "<data:text/html,e> <javascript:f>": "&lt;data:text/html,e&gt; &lt;javascript:f&gt;",
        "vector<std::string>": "vector&lt;std::string&gt;",
        "[![g](https://h.example/)](https://i.example/)": '<a href="https://i.example/">g</a>',
        "![*j*](https://k.example/)": '<a href="https://k.example/">j</a>',
        "&lt;https://l.example/?m&amp;n&gt;": '&lt;<a href="https://l.example/?m&amp;n">'
        "https://l.example/?m&amp;n</a>&gt;",
        "中**“文”**字": "中<strong>“文”</strong>字",
    }
    assert {text: markdown(text) for text in cases} == {
        text: f"<p>{html}</p>" for text, html in cases.items()
    }


@pytest.mark.full
def test_markdown_that_grows_is_the_same(browser: Any) -> None:
    text = "\n\n".join(SAMPLES.values())
    with serving(fake_service(ScriptedEngine("x"))) as address:
        page = browser.new_page()
        page.goto(address)
        differ = page.evaluate(
            """text => {
                const grown = new Markdown(), differ = [];
                for (let end = 1; end <= text.length; end += 3) {
                    const whole = new Markdown();
                    grown.show(text.slice(0, end));
                    whole.show(text.slice(0, end));
                    if (grown.node.innerHTML !== whole.node.innerHTML) differ.push(end);
                }
                return differ;
            }""",
            text,
        )
        page.close()
    assert differ == []


MATHS = r"""The roots of $ax^2+bx+c=0$ are, for \(a \ne 0\),

$$x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}$$, as

\[
\begin{align} y &= f'(x) \\ z &= \mathcal{L} \end{align}
\]

It costs $5 and then $10, or 5$ and 6$. \$x\$ `$y$` $\nosuch{x}$ \(\bad{\)"""


def test_formulas_are_mathml(open_page: Open) -> None:
    page = open_page(ScriptedEngine(MATHS))
    say(page, "Hi")
    ended(page)
    said = page.locator("article:last-child .md")
    names = page.evaluate(
        """() => [...document.querySelectorAll("article math")].map((math) =>
            [...math.querySelectorAll("*")].map((e) => e.localName).filter((name) =>
                ["msup", "mfrac", "msqrt", "mtable"].includes(name)))"""
    )
    assert names == [["msup"], [], ["mfrac", "msqrt", "msup"], ["mtable", "msup"]]
    assert page.evaluate(
        "[...document.querySelectorAll('article math')].map((e) => e.namespaceURI)"
    ) == ["http://www.w3.org/1998/Math/MathML"] * len(names)
    end = "It costs $5 and then $10, or 5$ and 6$. $x$ $y$ $\\nosuch{x}$ \\(\\bad{\\)"
    assert said.locator("p").last.inner_text() == end
    box = said.locator("mfrac").bounding_box()
    assert box["height"] > said.locator("msup").first.bounding_box()["height"]


def test_code_is_in_colour(open_page: Open) -> None:
    text = 'if a:\n    return "b"  # c'
    page = open_page(ScriptedEngine(f"```python\n{text}\n```\n\n```none\nif a\n```"))
    say(page, "Hi")
    ended(page)
    code = page.locator(".code code")
    assert code.first.inner_text() == text
    spans = code.first.evaluate("e => [...e.children].map(s => [s.classList[0], s.textContent])")
    assert ["t-keyword", "if"] in spans
    assert ["t-string", '"b"'] in spans
    assert ["t-comment", "# c"] in spans
    assert code.last.evaluate("e => e.childElementCount") == 0
    for name in ("constructor", "__proto__", "extend", "DFS"):  # no languages, but names there
        assert page.evaluate(f"coloured('x', '{name}', false)") == ["x"]


HOSTILE_TEX = (
    r"\href{javascript:window.hacked=1}{x}",
    r"\url{javascript:window.hacked=1}",
    r"\includegraphics{a.png}",
    r"\class{said}{x}",
    r"\id{send}{x}",
    r"\style{position:fixed}{x}",
    r"\data{theme=dark}{x}",
    r"\ref{x}",
    r"\text{<img src=x onerror=window.hacked=1>}",
    r"\kern-999em\raise 99em x",
    r"\rule{9999em}{9999em}",
)


@pytest.mark.full
def test_formulas_and_code_open_no_hole(open_page: Open) -> None:
    code = '<script>window.hacked=1</script><img src=x onerror="window.hacked=1">'
    answer = "\n\n".join(f"${tex}$" for tex in HOSTILE_TEX)
    answer += "".join(f"\n\n```{name}\n{code}\n```" for name in ("html", "js", "css", "bash"))
    page = open_page(ScriptedEngine(answer))
    say(page, "Hi")
    ended(page)
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.evaluate("window.hacked") is None
    assert page.locator("#thread").locator("script, img, a, iframe, svg, style").count() == 0
    names = page.evaluate(
        """() => [...new Set([...document.querySelectorAll("article math *")]
            .flatMap((e) => e.getAttributeNames()))]"""
    )
    assert not {"href", "src", "id", "onclick", "data-theme"} & {*names}
    # Content that is moved or too large stays within its answer.
    visible = page.evaluate(
        "getComputedStyle(document.querySelector('article:last-child .md')).overflow"
    )
    assert visible == "clip"
    assert page.evaluate("scroller.scrollWidth <= scroller.clientWidth")


def sse(*deltas: Mapping[str, Any], end: str = "data: [DONE]\n\n") -> dict[str, Any]:
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return {"status": 200, "content_type": "text/event-stream", "body": body + end}


def error(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": code}})
    return {"status": status, "content_type": "application/json", "body": body}


FAILURES: dict[str, tuple[dict[str, Any] | None, str]] = {
    "full": (error(429, "4 answers wait. Try again later."), "4 answers wait. Try again later."),
    "draining": (error(503, "The server is shutting down."), "The server is shutting down."),
    "proxy": ({"status": 502, "body": "<h1>Bad"}, "The server answered with status 502."),
    "gone": (None, "The server cannot be reached. Is it still running?"),
    "cut": (
        sse({"content": "Half"}, end=""),
        "The connection was closed before the answer had ended.",
    ),
}


@others_full("name", FAILURES, ("full", "cut"))
def test_failures_are_told_and_can_be_tried_again(open_page: Open, name: str) -> None:
    response, message = FAILURES[name]
    page = open_page(ScriptedEngine("Whole."))
    page.route(CHAT, lambda route: route.fulfill(**response) if response else route.abort())
    say(page, "Hi")
    page.wait_for_selector(".failed")
    assert page.inner_text(".failed p") == message
    assert page.locator("article :text('Half')").count() == ("Half" in str(response))
    page.unroute(CHAT)
    page.reload()
    page.click("button:text('Try again')")
    until(page, "document.querySelector('article:last-child').innerText.includes('Whole.')")
    assert page.locator(".failed").count() == 0
    texts = [message["content"] for message in stored(page)[0]["messages"]]
    assert texts == ["Hi", *(["Half"] if name == "cut" else []), "Whole."]  # that is a version


def test_a_message_after_a_failure(open_page: Open) -> None:
    """A failed answer stays in sight. Templates want users and assistants to take turns."""
    engine = ScriptedEngine("Whole.")
    page = open_page(engine)
    page.route(CHAT, lambda route: route.abort())
    say(page, "One")
    page.wait_for_selector(".failed")
    page.unroute(CHAT)
    say(page, "Two")
    ended(page)
    assert engine.prompts[0] == [{"role": "user", "content": "One\n\nTwo"}]
    shown = "[...document.querySelectorAll('.said, .failed, article .md:not([hidden])')]"
    assert page.evaluate(f"{shown}.map((each) => each.innerText)") == [
        "One",
        "The server cannot be reached. Is it still running?",
        "Two",
        "Whole.",
    ]


@pytest.mark.full
def test_a_conversation_that_is_too_long_is_told_in_a_line(open_page: Open) -> None:
    page = open_page(ScriptedEngine("Whole."), viewport={"width": 1024, "height": 640})
    told = (
        "The prompt has 9000 tokens, and this model's maximum context length is 8192 tokens. " * 2
    )
    refused = error(400, told, "context_length_exceeded")
    page.route(CHAT, lambda route: route.fulfill(**refused))
    say(page, "Long")
    page.wait_for_selector(".failed")
    line = page.locator(".failed p")
    assert line.inner_text() == (
        "The conversation exceeds 8,192 tokens. Shorten it, or start a new one."
    )
    line.evaluate("node => { node.style.whiteSpace = 'nowrap' }")
    height = line.bounding_box()["height"]
    line.evaluate("node => { node.style.whiteSpace = 'normal' }")
    assert line.bounding_box()["height"] == height


def test_the_title_of_the_conversation_reaches_the_pencil(open_page: Open) -> None:
    page = open_page(ScriptedEngine("Whole."), viewport={"width": 1024, "height": 640})
    say(page, "A title that is longer than the list of the conversations is wide")
    ended(page)
    gap = page.evaluate(
        """() => {
            const [title, pencil, bin] = document.querySelectorAll("#chats li.here button");
            const { paddingRight } = getComputedStyle(title);
            const from = title.getBoundingClientRect().right - parseFloat(paddingRight);
            return [pencil, bin].map((each) => each.getBoundingClientRect().right - from);
        }"""
    )
    assert gap == [28, 52]  # each needs 24 pixels, the least that is easily hit


@pytest.mark.full
def test_a_server_that_is_not_there(open_page: Open) -> None:
    page = open_page(ScriptedEngine("x"))
    page.route("**/v1/models", lambda route: route.abort())
    page.evaluate("loadModels()")
    page.wait_for_selector("text=Not connected")
    page.unroute("**/v1/models")  # it is asked again
    page.wait_for_selector(".empty h2:text('tiny')")


def tells(page: Any, text: str) -> None:
    """Wait until the page says just this of the server."""
    until(page, f"$('state').textContent === {json.dumps(text)}")


@pytest.mark.full
def test_a_model_that_is_being_loaded(fakes: list[FakeModel], open_page: Open) -> None:
    model = fakes[0]
    model.go_on.clear()
    page = open_page(Host([model], ServerOptions()))
    tells(page, "Loading the model: reading weights, 25 %")
    say(page, "Hi")
    model.go_on.set()
    ended(page)
    assert last_answer(page) == "ab"
    tells(page, "")
    model.restarts = True
    page.reload()
    tells(page, "The engine of a is started again.")
    model.restarts = False
    tells(page, "")


@pytest.mark.full
def test_one_of_several_models(fakes: list[FakeModel], open_page: Open) -> None:
    model = fakes[1]
    model.go_on.clear()
    page = open_page(Host(fakes, ServerOptions()))
    page.select_option("#model", "b")
    say(page, "Hi")
    tells(page, "Loading b: reading weights, 25 %")
    model.go_on.set()
    ended(page)
    assert page.get_attribute("article:last-child", "aria-label") == "b"
    assert [each for each in fakes if each.loads] == [model]
    tells(page, "")


@pytest.mark.full
def test_an_engine_that_fails_in_the_middle(open_page: Open) -> None:
    engine = ScriptedEngine("Half")
    engine.error = InferError("The GPU was lost.")
    page = open_page(engine)
    say(page, "Hi")
    page.wait_for_selector(".failed")
    assert page.inner_text(".failed p") == "The GPU was lost."
    assert last_answer(page) == "Half"


@pytest.mark.full
def test_a_key_is_asked_for_where_one_is_needed(open_page: Open) -> None:
    page = open_page(ScriptedEngine("Yes."), api_keys=["secret"])
    assert page.inner_text("#key-note") == "This server asks for an API key."
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-note:text('does not take')")
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    page.wait_for_selector(".empty h2:text('tiny')")
    say(page, "Hi")
    ended(page)
    assert last_answer(page) == "Yes."
    page.reload()
    say(page, "Again")
    until(page, "document.querySelectorAll('article').length === 4")


@pytest.mark.full
def test_reasoning_is_folded(open_page: Open) -> None:
    engine = ScriptedEngine("Done.")
    engine.thoughts = "Let me", " *see*."
    page = open_page(engine)
    say(page, "Hi")
    ended(page)
    assert page.inner_text("summary").startswith("Thought for ")
    assert not page.locator("details em").is_visible()
    page.click("summary")
    assert page.inner_text("details em") == "see"
    assert page.inner_text("article:last-child > .md") == "Done."
    say(page, "Go on")
    until(page, "document.querySelectorAll('article').length === 4")
    ended(page)
    assert engine.prompts[1][1] == {"role": "assistant", "content": "Done."}


@pytest.mark.full
def test_a_model_without_a_chat_template_continues_a_text(open_page: Open) -> None:
    engine = ScriptedEngine(", there *was* a", " cat")
    engine.without_template = True
    page = open_page(engine)
    say(page, "Once upon a time")
    ended(page)
    assert engine.prompts[0] == "Once upon a time"
    assert last_answer_text(page) == ", there *was* a"
    say(page, " black")
    ended(page)
    assert engine.prompts[1] == "Once upon a time, there *was* ablack"
    page.click("#new")
    assert "continues your text" in page.inner_text(".empty")


def last_answer_text(page: Any) -> str:
    text: str = page.inner_text("article:last-child .said")
    return text


def test_conversations_by_keyboard_alone(open_page: Open) -> None:
    engine = ScriptedEngine("One.", "Two.")
    page = open_page(engine)
    assert page.evaluate("document.activeElement.id") == "text"
    keys = page.keyboard
    keys.type("First")
    keys.press("Enter")
    ended(page)

    def tab_to(label: str, back: bool = True) -> None:
        for _ in range(40):
            keys.press("Shift+Tab" if back else "Tab")
            found = page.evaluate(
                "(e => e.getAttribute('aria-label') || e.textContent)(document.activeElement)"
            )
            if found == label:
                return
        pytest.fail(f"{label} cannot be reached")

    tab_to("New conversation")
    keys.press("Enter")
    assert page.evaluate("document.activeElement.id") == "text"
    keys.type("Second")
    keys.press("Enter")
    ended(page)
    tab_to("Rename First")
    keys.press("Enter")
    keys.type("Renamed")
    keys.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "Renamed"
    keys.press("Enter")  # opens it
    assert page.inner_text("article.user .said") == "First"
    tab_to("Delete Renamed")
    keys.press("Enter")
    assert {chat["title"] for chat in stored(page)} == {"Second"}
    tab_to("Undo", back=False)
    keys.press("Enter")
    assert {chat["title"] for chat in stored(page)} == {"Second", "Renamed"}
    assert page.inner_text("article.user .said") == "First"
    assert page.locator("#chats [aria-current]").inner_text() == "Renamed"


# Conversations as localStorage held them, before there were versions of messages.
OLD_CHATS = {
    "a": {
        "id": "a",
        "title": "Rivers",
        "named": False,
        "time": 1,
        "model": "tiny",
        "settings": {"temperature": 0.5},
        "messages": [
            {"role": "user", "content": "Name a river."},
            {"role": "assistant", "content": "The **Rhine**.", "model": "tiny"},
            {"role": "user", "content": "Another?"},
            {"role": "assistant", "content": "", "model": "tiny", "error": "It failed."},
        ],
    },
    "b": {"id": "b", "title": "Nothing", "time": 0, "messages": []},
}


def keep_old_chats(page: Any) -> None:
    for name, chat in OLD_CHATS.items():
        page.evaluate(
            "([name, text]) => localStorage.setItem(name, text)",
            [f"infer.chat.{name}", json.dumps(chat)],
        )
    page.evaluate("localStorage.setItem('infer.chat.c', 'none of ours')")


def test_conversations_of_localstorage_move(open_page: Open) -> None:
    engine = ScriptedEngine("The Nile.")
    page = open_page(engine)
    keep_old_chats(page)
    for _ in range(2):
        page.reload()
        page.wait_for_selector("article .failed")
        assert titles(page) == ["Rivers", "Nothing"]
        assert shown(page) == ["Name a river.", "The Rhine.", "Another?"]
    assert page.evaluate("Object.keys(localStorage)") == ["infer.chat.c"]
    assert {chat["id"] for chat in stored(page)} == {"a", "b"}
    page.click("button:text('Try again')")
    ended(page)
    assert [each["content"] for each in engine.prompts[0]] == [
        "Name a river.",
        "The **Rhine**.",
        "Another?",
    ]
    assert engine.asked[0][1].temperature == 0.5


@pytest.mark.full
def test_a_browser_that_keeps_nothing(open_page: Open) -> None:
    page = open_page(ScriptedEngine("One."), init="delete window.indexedDB; indexedDB = undefined")
    say(page, "Hi")
    ended(page)
    assert shown(page) == ["Hi", "One."]
    assert "ends with this tab" in page.inner_text("#notice")


@pytest.mark.full
def test_another_tab_has_the_same_conversations(open_page: Open) -> None:
    page = open_page(ScriptedEngine("One.", "Two."))
    say(page, "Hi")
    ended(page)
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("article.assistant")
    say(other, "And now?")
    ended(other)
    page.wait_for_selector("article:nth-child(4) :text('Two.')")
    other.click("#new")
    say(other, "More")
    ended(other)
    page.wait_for_selector("#chats .open:text('More')")
    other.click("[aria-label='Delete More']")
    page.wait_for_selector("#chats .open:text('More')", state="detached")


@pytest.mark.full
def test_conversations_are_found(open_page: Open) -> None:
    engine = ScriptedEngine("Bananas are yellow.", "Grass is green.", "So is moss.")
    page = open_page(engine)
    say(page, "Fruit")
    ended(page)
    page.click("#new")
    say(page, "Meadow")
    ended(page)
    of_message(page, 1, "Regenerate").click()
    ended(page)
    assert titles(page) == ["Meadow", "Fruit"]
    assert page.inner_text("#chats h2") == "Today"
    search = page.get_by_label("Search conversations")
    search.fill("YELLOW")
    assert titles(page) == ["Fruit"]
    assert page.inner_text("#chats small") == "Bananas are yellow."
    search.fill("meadow")
    assert titles(page) == ["Meadow"]
    search.fill("grass")  # in the version that is not shown
    page.keyboard.press("Enter")  # opens the first
    assert shown(page) == ["Meadow", "Grass is green."]
    search.fill("violet")
    assert titles(page) == []
    assert page.inner_text("#found") == "Nothing was found."
    search.fill("")
    assert titles(page) == ["Meadow", "Fruit"]


def test_the_list_has_dates(open_page: Open) -> None:
    page = open_page(ScriptedEngine("One."))
    now = datetime(2026, 3, 20, 0, 30)
    times = {
        "Today": now - timedelta(minutes=29),
        "Yesterday": now - timedelta(hours=1),
        "Last 7 days": now - timedelta(days=7),
        "Last 30 days": now - timedelta(days=8),
        "January 2026": datetime(2026, 1, 31),
        "December 2024": datetime(2024, 12, 1),
    }
    for name, time in times.items():
        call = f"dayOf({time.timestamp() * 1000}, {now.timestamp() * 1000})"
        assert page.evaluate(call) == name


@pytest.mark.full
def test_conversations_are_exported_and_imported(open_page: Open, tmp_path: Path) -> None:
    page = open_page(ScriptedEngine("One.", "Two."))
    say(page, "Hi")
    ended(page)
    of_message(page, 1, "Regenerate").click()
    ended(page)
    before = stored(page)
    page.click("#open-settings")
    with page.expect_download() as download:
        page.click("text=Export conversations")
    assert re.fullmatch(r"conversations-[\d-]{10}\.json", download.value.suggested_filename)
    exported = tmp_path / "exported.json"
    download.value.save_as(exported)

    def import_file(page: Any, path: Path, told: str) -> None:
        page.set_input_files("#import-file", path)
        page.wait_for_selector(f"#transferred:text('{told}')")

    import_file(page, exported, "Imported: 0. Here already: 1.")
    other = open_page(ScriptedEngine("Three."))
    other.click("#open-settings")
    import_file(other, exported, "Imported: 1.")
    assert stored(other) == before
    other.keyboard.press("Escape")
    other.click("#chats .open")
    assert shown(other) == ["Hi", "Two."]
    of_message(other, 1, "Previous version").click()
    assert shown(other) == ["Hi", "One."]

    whole = json.loads(exported.read_text())
    hostile = {
        **before[0],
        "id": "hostile",
        "title": "<img src=x onerror=window.hacked=1>",
        "settings": {"temperature": {"a": 1}, "system": "Be kind."},
        "tip": "missing",
        "messages": [
            {"id": "1", "parent": None, "role": "user", "content": "Kept", "__proto__": {"x": 1}},
            {"id": "2", "parent": "3", "role": "assistant", "content": "of a later one"},
            {"id": "3", "parent": "2", "role": "system", "content": "of no role"},
            {"id": "4", "parent": "1", "role": "assistant", "content": {"no": "text"}},
        ],
    }
    texts = {
        "hostile.json": (json.dumps({**whole, "chats": [hostile]}), "Imported: 1."),
        "newer.json": (json.dumps({**whole, "version": 2}), "is no file of conversations"),
        "other.json": ("[]", "is no file of conversations"),
        "broken.json": ('{"format', "is no file of conversations"),
        "list.json": (json.dumps({**whole, "chats": [{"id": 1}]}), "is no file of conversations"),
    }
    other.click("#open-settings")
    for name, (text, told) in texts.items():
        (tmp_path / name).write_text(text)
        import_file(other, tmp_path / name, told)
    (read,) = (chat for chat in stored(other) if chat["id"] == "hostile")
    assert read["settings"] == {"system": "Be kind."}
    assert [message["content"] for message in read["messages"]] == ["Kept"]
    assert other.evaluate("window.hacked") is None


@pytest.mark.full
def test_long_messages_are_folded(open_page: Open) -> None:
    page = open_page(ScriptedEngine("One."))
    say(page, "short")
    ended(page)
    assert page.locator("text=Show all").count() == 0
    page.fill("#text", "line\n" * 40)
    page.keyboard.press("Enter")
    ended(page)
    said = page.locator(".said").nth(1)
    whole = said.evaluate("e => e.scrollHeight")
    assert said.bounding_box()["height"] < whole / 2
    page.click("text=Show all")
    assert said.bounding_box()["height"] > whole - 1
    assert of_message(page, 2, "Show less").get_attribute("aria-expanded") == "true"
    say(page, "more")  # leaves it as it is
    ended(page)
    assert said.bounding_box()["height"] > whole - 1


def transfer(page: Any, event: str, target: str, files: Mapping[str, bytes]) -> None:
    """Drop or paste files."""
    page.evaluate(
        """([kind, target, files]) => {
            const all = new DataTransfer();
            for (const [name, bytes] of files)
                all.items.add(new File([new Uint8Array(bytes)], name));
            const options = { bubbles: true, cancelable: true };
            const event = kind === "paste"
                ? new ClipboardEvent(kind, { ...options, clipboardData: all })
                : new DragEvent(kind, { ...options, dataTransfer: all });
            document.querySelector(target).dispatchEvent(event);
            if (!event.defaultPrevented) throw new Error("The browser would have done it.");
        }""",
        [event, target, [[name, [*data]] for name, data in files.items()]],
    )


def test_text_files_are_attached(open_page: Open) -> None:
    engine = ScriptedEngine("One.", "Two.", "Three.")
    page = open_page(engine)
    code = "let a = `b`;\n```\n"
    files = [
        {"name": "a.js", "mimeType": "text/javascript", "buffer": code.encode()},
        {"name": "image.png", "mimeType": "image/png", "buffer": b"\x89PNG\0"},
    ]
    page.set_input_files("#file", files)
    page.wait_for_selector("#files-note:text('image.png')")
    transfer(page, "drop", "#scroll", {"<b>.txt": "bold\r\nkäse".encode()})
    page.wait_for_selector("#files li:nth-child(2)")
    assert page.locator("#files li").all_inner_texts() == ["a.js", "<b>.txt"]
    say(page, "What is this?")
    ended(page)
    assert page.locator("#files li").count() == 0
    assert engine.prompts[0] == [
        {
            "role": "user",
            "content": f"a.js:\n````\n{code}\n````\n\n"
            "<b>.txt:\n```\nbold\nkäse\n```\n\nWhat is this?",
        }
    ]
    page.reload()
    page.wait_for_selector(".file")
    page.click(".file summary >> nth=0")
    assert page.locator(".file pre").inner_text() == code
    of_message(page, 0, "Edit").click()  # the files stay
    page.fill(".editor textarea", "And now?")
    page.keyboard.press("Enter")
    ended(page)
    assert engine.prompts[1][0]["content"].endswith("käse\n```\n\nAnd now?")

    page.click("#new")
    transfer(page, "paste", "#text", {"only.md": b"# Title"})
    page.wait_for_selector("#files li")
    page.click("[aria-label='Remove only.md']")
    assert page.is_disabled("#send")
    large = {"name": "large", "mimeType": "text/plain", "buffer": b"a" * 1_000_001}
    page.set_input_files("#file", [large])
    page.wait_for_selector("#files-note:text('more than 1 MB')")
    transfer(page, "paste", "#text", {"only.md": b"# Title"})
    page.wait_for_selector("#files li")
    page.click("#send")
    ended(page)
    assert engine.prompts[2] == [{"role": "user", "content": "only.md:\n```\n# Title\n```"}]
    assert titles(page)[0] == "only.md"


@pytest.mark.full
def test_the_context_that_is_used(open_page: Open) -> None:
    engine = ScriptedEngine("One two three.")  # which has 3 tokens, as the prompt has
    engine.context = 12
    page = open_page(engine)
    assert not page.locator("#context").is_visible()
    say(page, "Hi")
    ended(page)
    assert page.inner_text("#context").split() == ["50", "%", "of", "the", "context", "is", "used"]
    title = page.get_attribute("#context", "title")
    assert title == "This conversation has 6 tokens of the 12 that the model's context holds."
    page.reload()
    page.wait_for_selector("#context", state="visible")
    page.click("#new")
    assert not page.locator("#context").is_visible()


@pytest.mark.full
def test_what_an_answer_took_is_explained(open_page: Open) -> None:
    page = open_page(ScriptedEngine("One two three."))
    say(page, "Hi")
    ended(page)
    parts = page.locator(".stats span")
    explained = [part.get_attribute("title") for part in parts.all()]
    assert len(explained) >= 2
    assert all(explained)


def test_shortcuts(open_page: Open) -> None:
    engine = ScriptedEngine("One.", "Two.", "word ")
    page = open_page(engine)
    keys = page.keyboard
    say(page, "First")
    ended(page)
    keys.press("ArrowUp")  # edits the last message
    assert page.input_value(".editor textarea") == "First"
    keys.type("!")
    keys.press("Enter")
    ended(page)
    assert shown(page) == ["First!", "Two."]
    keys.type("x")
    keys.press("ArrowUp")  # something is typed
    assert page.locator(".editor").count() == 0
    keys.press("Backspace")
    keys.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "search"
    keys.press("?")  # is searched for
    assert page.input_value("#search") == "?"
    assert not page.locator("#shortcuts").is_visible()
    keys.press("Control+Shift+O")
    assert page.locator("article").count() == 0
    assert page.evaluate("document.activeElement.id") == "text"
    page.click("#open-shortcuts")
    assert "Search conversations" in page.inner_text("#shortcuts")
    keys.press("Escape")
    page.evaluate("scroller.focus()")
    keys.press("?")
    assert page.locator("#shortcuts").is_visible()
    keys.press("Control+k")  # stays
    assert page.locator("#shortcuts").is_visible()
    keys.press("Escape")
    assert not page.locator("#shortcuts").is_visible()


@pytest.mark.full
def test_examples_are_asked_with_a_click(open_page: Open) -> None:
    engine = ScriptedEngine("Yes.")
    page = open_page(engine)
    example = page.locator(".example").first
    text = example.inner_text()
    example.click()
    ended(page)
    assert engine.prompts == [[{"role": "user", "content": text}]]
    assert shown(page) == [text, "Yes."]


@pytest.mark.full
def test_the_send_button_looks_like_one(open_page: Open) -> None:
    engine = ScriptedEngine("word ")
    engine.endless = True
    page = open_page(engine)
    send = page.locator("#send")
    assert send.inner_text() == "Send"
    colour = "e => getComputedStyle(e).backgroundColor"
    assert send.evaluate(colour) != page.locator(".box").evaluate(colour)
    say(page, "Hi")
    page.wait_for_selector("#send[aria-label=Stop]")
    assert send.inner_text() == "Stop"
    send.click()
    ended(page)


@pytest.mark.full
def test_a_narrow_window(open_page: Open) -> None:
    text = "A" * 300 + "\n\n```\n" + "b" * 300 + "\n```\n\n| " + "c " * 80 + "| d |\n| - | - |\n"
    sum_of_many = " + ".join(f"x_{i}" for i in range(9))
    text = f"In a line ${sum_of_many}$.\n\n$${sum_of_many}$$\n\n{text}"
    page = open_page(ScriptedEngine(text), viewport={"width": 320, "height": 560})
    assert not page.locator("#side").is_visible()
    say(page, "word" * 100)
    ended(page)
    for element in ("scroller", "document.documentElement"):
        assert page.evaluate(f"{element}.scrollWidth <= {element}.clientWidth")
    formula = page.locator("article p .math").bounding_box()
    assert formula["x"] + formula["width"] <= 320  # it goes on in the next line
    page.click("#menu")
    assert page.locator("#side").is_visible()
    page.keyboard.press("Escape")
    page.wait_for_selector("#side", state="hidden")
    assert page.evaluate("document.activeElement.id") == "menu"
    page.click("#menu")
    page.click("#new")
    page.wait_for_selector("#side", state="hidden")
    assert page.locator("article").count() == 0


@pytest.mark.full
def test_reading_is_not_disturbed(open_page: Open) -> None:
    """An answer is followed at its end alone, and a selection in it lasts."""
    engine = ScriptedEngine("A paragraph of some words.\n\n")
    engine.endless = True
    page = open_page(engine, viewport={"width": 800, "height": 400})
    say(page, "Go on")
    until(page, "scroller.scrollHeight > 2 * scroller.clientHeight && atEnd()")
    page.evaluate("scroller.scrollTop = 0")
    page.wait_for_selector("#down", state="visible")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('article .md p'))")
    height = page.evaluate("scroller.scrollHeight")
    until(page, f"scroller.scrollHeight > {height} + 100")
    assert page.evaluate("scroller.scrollTop") == 0
    assert page.evaluate("getSelection().toString()") == "A paragraph of some words."
    page.click("#down")
    until(page, "atEnd()")
    page.keyboard.press("Escape")
    ended(page)


@pytest.mark.full
def test_a_screen_reader_gets_blocks(open_page: Open) -> None:
    page = open_page(
        ScriptedEngine("One two three.\n\nFour five.\n\n```python\nprint()\n```\n\nSix.")
    )
    page.evaluate(
        """new MutationObserver(all => {
            for (const { addedNodes } of all)
                for (const node of addedNodes) (window.said ??= []).push(node.textContent);
        }).observe($("spoken"), { childList: true })"""
    )
    say(page, "Hi")
    ended(page)
    assert page.evaluate("window.said") == ["One two three.", "Four five.", "Code, python.", "Six."]
    assert page.get_attribute("#spoken", "aria-live") == "polite"


@pytest.mark.full
def test_code_is_copied(open_page: Open) -> None:
    page = open_page(ScriptedEngine("```\nlet a = 1;\n```"))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(page, "Hi")
    ended(page)
    page.click(".code button")
    page.wait_for_selector(".code button:text('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == "let a = 1;"


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_that_axe_knows_is_in_the_way(open_page: Open, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    text = "# A\n\n`c` [d](https://e.example) $x^2$\n\n$$y$$\n\n> f\n\n| h |\n| - |\n| j |\n\n"
    code = "@k\nclass A(B):\n    c: int = f(1, True, 'd', None)  # e\n"
    text += f"```python\n{code}```\n\n```html\n<a b='c'>d</a>\n```\n\n```diff\n-a\n+b\n```"
    page = open_page(ScriptedEngine(text), color_scheme=scheme)

    def check() -> None:
        found = axe.run(page).response["violations"]
        assert [(each["id"], [n["html"] for n in each["nodes"]]) for each in found] == []

    check()
    say(page, "Hi")
    ended(page)
    check()
    of_message(page, 1, "Regenerate").click()
    ended(page)
    transfer(page, "paste", "#text", {"a.txt": b"a", "b.png": b"\0"})
    page.wait_for_selector("#files-note:text('b.png')")
    check()
    say(page, "line\n" * 20)
    ended(page)
    of_message(page, 0, "Edit").click()
    page.fill("#search", "line")
    check()
    page.fill("#search", "")
    page.click("#open-settings")
    page.click("text=More sampling options")
    page.get_by_label("JSON schema").fill("{")
    check()
    page.keyboard.press("Escape")
    page.click("#open-shortcuts")
    check()
    page.keyboard.press("Escape")
    page.route(CHAT, lambda route: route.abort())
    say(page, "Hi")
    page.wait_for_selector(".failed")
    page.set_viewport_size({"width": 360, "height": 640})
    check()
