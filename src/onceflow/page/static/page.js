// What the server cannot do: show whether the page is live, count seconds, describe what the mouse
// points at, remember a colour scheme. Without scripts the page shows the same, but is not live.
"use strict";
(() => {
  const by = (id) => document.getElementById(id);
  const QUIET = 15000; // milliseconds without a message of the server
  let heard = Date.now();
  let ahead = 0; // milliseconds by which our clock is ahead of the server's

  // ---- live or not
  const live = by("live");
  const tell = (now, says) => {
    if (!live || live.textContent === says) return;
    live.dataset.live = now;
    live.textContent = says;
  };
  const lost = () => tell("off", "not live: reconnecting …");
  document.body.addEventListener("htmx:sseMessage", (event) => {
    heard = Date.now();
    if (event.detail.type === "stale") tell("stale", `not live: ${by("stale").textContent}; as of`);
    if (event.detail.type !== "beat") return;
    tell("on", "live");
    const time = document.querySelector("[sse-swap=beat] time");
    if (time) ahead = Date.now() - Date.parse(time.dateTime);
  });
  document.body.addEventListener("htmx:sseOpen", () => { heard = Date.now(); });
  document.body.addEventListener("htmx:sseError", lost);
  document.body.addEventListener("htmx:sseClose", lost);

  // ---- seconds ago
  const age = (s) => {
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
      if (s >= 2 * size) return `${Math.round(s / size)} ${unit} ago`;
    return `${Math.max(0, Math.round(s))} s ago`;
  };
  const count = () => {
    for (const time of document.querySelectorAll("time.ago"))
      time.textContent = age((Date.now() - ahead - Date.parse(time.dateTime)) / 1000);
  };
  const tick = () => {
    if (live && live.dataset.live === "on" && Date.now() - heard > QUIET) lost();
    count();
  };
  tick();
  setInterval(tick, 1000);
  document.body.addEventListener("htmx:afterSwap", count);

  // ---- the description of what the mouse points at; kept while its chart is replaced
  let shown = null; // [id of the description, text]
  const say = (event) => {
    const node = event.target.closest && event.target.closest(".column, .plot .mark");
    if (!node) return;
    const out = node.closest(".card").querySelector(".readout");
    out.textContent = node.querySelector("title").textContent;
    shown = [out.id, out.textContent];
  };
  document.addEventListener("mouseover", say);
  document.addEventListener("focusin", say);
  document.addEventListener("mouseout", (event) => {
    const to = event.relatedTarget;
    if (!(to && to.closest && to.closest(".frame"))) shown = null;
  });
  document.addEventListener("focusout", () => { shown = null; });
  document.body.addEventListener("htmx:afterSwap", () => {
    if (shown && shown[0] && by(shown[0])) by(shown[0]).textContent = shown[1];
  });
  document.addEventListener("keydown", (event) => {
    const column = event.target.closest && event.target.closest(".column");
    if (!column) return;
    const all = [...column.parentNode.querySelectorAll(".column")];
    const at = all.indexOf(column);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined || !all[to]) return;
    event.preventDefault();
    all[to].focus();
  });

  // ---- answers with an error status have a text for people too
  document.body.addEventListener("htmx:beforeSwap", (event) => {
    if (event.detail.xhr && event.detail.xhr.status >= 400) {
      event.detail.shouldSwap = true;
      event.detail.isError = false;
    }
  });
  document.body.addEventListener("htmx:afterSettle", (event) => {
    if (event.target.id === "plan") { event.target.scrollIntoView({ block: "nearest" }); event.target.focus({ preventScroll: true }); }
    for (const copy of document.querySelectorAll(".copy[hidden]")) copy.hidden = !navigator.clipboard;
  });
  document.addEventListener("click", (event) => {
    const copy = event.target.closest && event.target.closest(".copy");
    if (copy) navigator.clipboard.writeText(copy.dataset.copy).then(() => { copy.textContent = "Copied"; });
  });

  // ---- colours: those of the system, or as chosen
  const theme = by("theme");
  const NEXT = { auto: "light", light: "dark", dark: "auto" };
  const SIGN = { auto: "◐", light: "○", dark: "●" };
  const WORDS = { auto: "those of the system", light: "light", dark: "dark" };
  const paint = () => {
    const now = document.documentElement.dataset.theme || "auto";
    theme.textContent = `${SIGN[now]} ${now}`;
    theme.setAttribute("aria-label", `Colours: ${WORDS[now]}. Change to ${WORDS[NEXT[now]]}`);
    return now;
  };
  if (theme) {
    theme.hidden = false;
    paint();
    theme.addEventListener("click", () => {
      const next = NEXT[paint()];
      if (next === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = next;
      document.cookie = `onceflow-theme=${next}; path=/; max-age=31536000; samesite=strict`;
      paint();
    });
  }
})();
