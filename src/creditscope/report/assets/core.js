"use strict";
/* The page's state is one object, and the address carries it: #step=30&group=2. A section registers a function, which
   is started with its element and its data; it changes the state with `set` and follows it with `on`. Text reaches the
   document through `el` alone, which never parses it. */
const creditscope = (() => {
  const starters = {}, followers = [], state = {};
  const SECTION = "section"; // the part of the address that is an anchor

  function read() {
    const words = location.hash.slice(1);
    const found = {};
    if (words && !words.includes("=")) { found[SECTION] = words; }
    else for (const [key, value] of new URLSearchParams(words)) found[key] = value;
    return found;
  }

  function write() {
    const words = new URLSearchParams();
    for (const [key, value] of Object.entries(state)) if (value !== null && value !== undefined) words.set(key, value);
    // Some browsers refuse after a hundred changes in half a minute, as a held key makes: the next one will do.
    try { history.replaceState(null, "", "#" + words.toString()); } catch { /* the state itself has changed */ }
  }

  /* Change the state: `changes` maps keys to values, null removes. Followers of the changed keys are told once. */
  function set(changes) {
    const changed = Object.keys(changes).filter((key) => {
      const value = changes[key] === null || changes[key] === undefined ? undefined : String(changes[key]);
      if (state[key] === value) return false;
      if (value === undefined) delete state[key]; else state[key] = value;
      return true;
    });
    if (!changed.length) return;
    write();
    tell(changed);
  }

  function tell(changed) {
    for (const { keys, follow } of followers) if (keys.some((key) => changed.includes(key))) follow(state);
  }

  /* Follow some keys; called at once with the state as it is. */
  function on(keys, follow) { followers.push({ keys, follow }); follow(state); }

  /* A number of the state, or `otherwise`. */
  function number(key, otherwise = null) {
    const value = state[key] === undefined ? NaN : Number(state[key]);
    return Number.isFinite(value) ? value : otherwise;
  }

  /* An element. Children are text or nodes; attributes are set, never parsed; `on` holds listeners. */
  function el(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
      else if (value === true) node.setAttribute(key, "");
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined && child !== false).map(
      (child) => child instanceof Node ? child : document.createTextNode(String(child))));
    return node;
  }

  /* The same in the namespace of svg. */
  function svg(name, attributes = {}, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  /* A number for people: four significant digits, an en dash for nothing. */
  function show(value, digits = 4) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size >= 1e-4 && size < 1e6 ? String(Number(value.toPrecision(digits))) : value.toExponential(digits - 1);
  }

  /* The page's name for names of files. */
  const run = () => document.title.replace(/: creditscope report$/, "").replace(/[^\p{L}\p{N}_.]+/gu, "-").replace(/^[-.]+|-+$/g, "").slice(0, 80) || "run";

  /* A file for the user; its name begins with the run's, as every run has the same charts. */
  function save(name, text, type) {
    const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: `${run()}-${name}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  /* Rows, an array of objects, as CSV. A cell that a spreadsheet would take for a formula gets a quote before it. */
  function csv(rows) {
    const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
    const cell = (value) => {
      if (value === null || value === undefined) return "";
      if (typeof value === "number") return String(value);
      const text = /^\s*[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
      return /[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
    };
    return [columns, ...rows.map((row) => columns.map((column) => row[column]))].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
  }

  function section(id, start) { starters[id] = start; }

  async function unpack(element) {
    const bytes = Uint8Array.from(atob(element.textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  /* Open what is folded up around an anchor; browsers do so for some links and not for all. */
  function reveal(id) {
    const target = document.getElementById(id);
    let opened = false;
    for (let part = target; part; part = part.parentElement) if (part.matches("details:not([open])")) opened = part.open = true;
    if (opened) target.scrollIntoView();
  }

  async function start() {
    Object.assign(state, read());
    const anchor = state[SECTION];
    delete state[SECTION];
    const data = await unpack(document.getElementById("data"));
    for (const [id, begin] of Object.entries(starters)) {
      const root = document.getElementById(id);
      if (root && data[id] !== undefined) await begin(root, data[id]);
    }
    window.addEventListener("hashchange", () => {
      const found = read(), keys = [...new Set([...Object.keys(state), ...Object.keys(found)])];
      if (Object.keys(found).length === 1 && found[SECTION]) { // a link to a section keeps the state, and the address it
        reveal(found[SECTION]);
        if (Object.keys(state).length) write();
        return;
      }
      const changed = keys.filter((key) => state[key] !== found[key]);
      for (const key of keys) delete state[key];
      Object.assign(state, found);
      tell(changed);
    });
    if (anchor) reveal(anchor);
    document.documentElement.dataset.ready = "yes";
  }

  return { section, set, on, number, state, el, svg, show, save, csv, start };
})();
