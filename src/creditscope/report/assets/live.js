/* While a run goes on: every few seconds the server is asked which page it has, and when that is another one, it is
   loaded. The address keeps what was chosen; what it does not hold (where one was reading, what was open, where the
   focus stood) is kept over the load. A reader who wants the page to stand still can have that. */
(() => {
  const { el } = creditscope;
  const EVERY = 3000, KEPT = "creditscope.live";
  const kept = JSON.parse(sessionStorage.getItem(KEPT) || "{}");
  const status = el("span", { role: "status", id: "live-status" });
  const since = el("span", { class: "soft", id: "live-age" }); // not part of the status: it would be read out every few seconds
  const pause = el("button", { type: "button", id: "live-pause", on: { click: () => { keep({ paused: !paused() }); say(""); } } });
  document.querySelector("header").prepend(el("div", { class: "bar", id: "live" }, status, since, pause));
  const standing = document.querySelector('[data-fact="run"] dd')?.textContent; // a page of several runs has none

  function keep(changes) { sessionStorage.setItem(KEPT, JSON.stringify(Object.assign(kept, changes))); }
  function paused() { return Boolean(kept.paused); }
  function say(notice) {
    pause.textContent = paused() ? "Resume" : "Pause";
    if (paused()) since.textContent = "";
    const text = notice || `Live: ${paused() ? "paused; " : ""}${standing || "the page follows the runs"}.`;
    if (status.textContent !== text) status.textContent = text; // told once, not at every look
  }

  const ago = (s) => s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;

  async function ask() {
    const found = await (await fetch("version", { cache: "no-store" })).json();
    since.textContent = paused() || found.age === null ? "" : `updated ${ago(found.age)} ago`;
    return found;
  }

  async function look() {
    try {
      const { version, notice } = await ask();
      if (version !== document.documentElement.dataset.version) return load();
      say(notice);
    } catch {
      say("Live: the server does not answer; this is the last page it gave.");
    }
    return null;
  }

  /* One question at a time, and none while nobody looks. */
  async function follow() {
    if (!paused() && !document.hidden) await look();
    setTimeout(follow, EVERY);
  }

  function load() {
    const open = [...document.querySelectorAll("details")].map((details) => details.open);
    keep({ y: window.scrollY, open, focus: document.activeElement ? document.activeElement.id : "" });
    history.scrollRestoration = "manual";
    location.reload();
  }

  function restore() {
    if (document.documentElement.dataset.ready !== "yes") return requestAnimationFrame(restore);
    if (kept.y === undefined) return null;
    document.querySelectorAll("details").forEach((details, i) => { details.open = kept.open[i] ?? details.open; });
    const focused = kept.focus && document.getElementById(kept.focus);
    if (focused) focused.focus({ preventScroll: true });
    window.scrollTo(0, kept.y);
    history.scrollRestoration = "auto";
    return keep({ y: undefined });
  }

  say("");
  ask().catch(() => {});
  restore();
  setTimeout(follow, EVERY);
})();
