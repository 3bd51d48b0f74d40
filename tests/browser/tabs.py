"""A tab of the browser that records what went wrong in it."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Page, Request, expect

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
# A policy that is violated says so to the document, before any script of the page runs.
_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`));
"""
# What a page must have to be found one's way in without eyes: what is missing.
_STRUCTURE = """
() => {
  const found = [];
  const all = (query) => [...document.querySelectorAll(query)];
  const one = (query) => { const n = all(query).length; if (n !== 1) found.push(`${n} ${query}`); };
  ["h1", "main", "header", "footer", "head > title", "a.skip"].forEach(one);
  if (!document.documentElement.lang) found.push("no language");
  const named = (node) => (node.getAttribute("aria-label") || node.textContent
    || (node.labels && [...node.labels].map((l) => l.textContent).join("")) || "").trim()
    || (node.getAttribute("aria-labelledby") && document.getElementById(
      node.getAttribute("aria-labelledby")));
  for (const node of all("a[href], button, input:not([type=hidden]), summary, nav, section, iframe"
      + ", svg[role=img], [role=group], [role=region]")) {
    const name = node.matches("nav, section, [role=group], [role=region]")
      ? node.getAttribute("aria-label")
        || document.getElementById(node.getAttribute("aria-labelledby"))
      : node.matches("iframe") ? node.title : named(node);
    if (!name) found.push(`no name: ${node.outerHTML.slice(0, 120)}`);
  }
  for (const node of all("svg:not([role])"))
    if (node.getAttribute("aria-hidden") !== "true") found.push("a picture without words");
  const ids = all("[id]").map((node) => node.id);
  for (const id of new Set(ids.filter((id, at) => ids.indexOf(id) !== at)))
    found.push(`twice: #${id}`);
  const levels = all("h1, h2, h3, h4, h5").map((node) => Number(node.tagName[1]));
  levels.forEach((level, at) => {
    if (at && level > levels[at - 1] + 1) found.push(`h${level} follows h${levels[at - 1]}`);
  });
  for (const node of all("th:not([scope])")) found.push(`th without scope: ${node.textContent}`);
  if (all("nav a[aria-current=page]").length > 2) found.push("in several places at once");
  return found;
}
"""


class Tab:
    """`page` is Playwright's. The tab records its requests and its errors."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.new_page()
        self.url = url.rstrip("/")
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.add_init_script(_VIOLATIONS)
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._asked)

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _asked(self, request: Request) -> None:
        self.asked.append(request.url)

    # ------------------------------------------------------------ looking

    def go(self, path: str) -> Tab:
        """Load a view, and mark this load."""
        self.page.goto(self.url + path)
        self.page.evaluate("window.loaded = 'once'")
        return self

    def go_live(self, path: str) -> Tab:
        self.go(path)
        expect(self.live).to_have_text("live")
        return self

    @property
    def live(self) -> Locator:
        return self.page.locator("#live")

    @property
    def main(self) -> Locator:
        return self.page.get_by_role("main")

    def figure(self, name: str) -> Locator:
        """A number of the page, by its label."""
        term = self.page.get_by_text(name, exact=True)
        return self.page.locator("dl.figures > div").filter(has=term).locator("dd").first

    def number(self, name: str) -> int:
        return int(self.figure(name).inner_text().split()[0].replace(",", ""))

    @property
    def focused(self) -> str:
        """The element that has the focus, in words."""
        return str(
            self.page.evaluate(
                "(document.activeElement.getAttribute('aria-label') "
                "|| document.activeElement.textContent).trim()"
            )
        )

    def tab_to(self, text: str) -> None:
        """Move the focus there by the keyboard."""
        for _ in range(60):
            self.page.keyboard.press("Tab")
            if self.focused.startswith(text):
                return
        raise AssertionError(f"Tab does not lead to {text!r}")

    # ------------------------------------------------------------ judging

    def was_not_reloaded(self) -> bool:
        return bool(self.page.evaluate("window.loaded === 'once'"))

    def too_wide(self) -> str:
        """Empty, or by how much the page scrolls sideways, and which element causes it."""
        return str(
            self.page.evaluate(
                """() => {
                  const room = window.innerWidth, wide = document.scrollingElement.scrollWidth;
                  if (wide <= room) return "";
                  const all = [...document.querySelectorAll("main *, header *, footer *")];
                  const out = all.find((node) => node.getBoundingClientRect().right > room + 1);
                  return `${wide - room} px: ${out ? out.outerHTML.slice(0, 200) : "?"}`;
                }"""
            )
        )

    def structure(self) -> list[str]:
        found: list[str] = self.page.evaluate(_STRUCTURE)
        return found

    def is_clean(self, *, but: tuple[str, ...] = ()) -> None:
        """Check that nothing is on the console, nothing violates the policy, and nothing comes from
        elsewhere. `but`: messages that are expected."""
        violations = self.page.evaluate("window.violations")
        assert not violations, violations
        complaints = [c for c in self.complaints if not any(known in c for known in but)]
        assert not complaints, complaints
        for url in self.asked:
            host = urlsplit(url).hostname
            assert host is not None
            assert ipaddress.ip_address(host).is_loopback, url

    def shoot(self, folder: Path, name: str) -> None:
        self.page.screenshot(path=folder / f"{name}.png", full_page=True)

    def colours(self) -> Any:
        return self.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")


Open = Callable[..., Tab]  # an address, and options of a browser's context
