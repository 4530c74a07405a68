// Times in the reader's zone, the stream of the live part, figures, signing in, actions, and the document of a new job.
"use strict";

const TIME_FORMAT = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });
function localTimes(root) {
  for (const one of root.querySelectorAll("time")) one.textContent = TIME_FORMAT.format(new Date(one.dateTime));
}

// Figures: Vega-Lite specifications of the API. The libraries are loaded by the first page that has one.
const DRAWERS = ["vega", "vega-lite", "vega-interpreter"];
const DARK = matchMedia("(prefers-color-scheme: dark)");

function script(name) {
  return new Promise((resolve, reject) => {
    const one = document.createElement("script");
    Object.assign(one, { src: `/console/static/${name}.min.js`, onload: resolve, onerror: reject });
    document.head.append(one);
  });
}

let drawers = null;
function loaded() {
  drawers ??= DRAWERS.reduce((before, name) => before.then(() => script(name)), Promise.resolve())
    .catch((error) => { drawers = null; throw error; });  // loaded again by the next attempt
  return drawers;
}

function cell(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : value === null ? "" : String(value);
}

function valueTable(figure) {
  const details = document.createElement("details"), summary = document.createElement("summary");
  const scroll = document.createElement("div"), body = document.createElement("table");
  const rows = figure.spec.data.values, names = Object.keys(rows[0]).filter((name) => name !== "label");
  summary.textContent = `Values (${rows.length})`;
  Object.assign(scroll, { className: "scroll tall", tabIndex: 0 });
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", `Values: ${figure.title}`);
  const head = body.createTHead().insertRow();
  for (const name of names) {
    head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: name }));
  }
  const lines = body.createTBody();
  for (const row of rows) {
    const line = lines.insertRow();
    for (const name of names) {
      const one = line.insertCell();
      if (name === "time") one.append(Object.assign(document.createElement("time"), { dateTime: row[name] }));
      else one.textContent = cell(row[name]);
      if (typeof row[name] === "number") one.className = "n";
    }
  }
  scroll.append(body);
  details.append(summary, scroll);
  localTimes(details);
  return details;
}

// Figures are made again when they have new values: an open table stays open, with its scrolling and the focus.
function keepTable(shown, next) {
  const parts = (outer) => ["summary", ".drawing", ".scroll"].map((one) => outer.querySelector(one));
  const [before, after] = [parts(shown), parts(next)], focused = before.indexOf(document.activeElement);
  next.querySelector("details").open = shown.querySelector("details").open;
  const { scrollTop, scrollLeft } = before[2];
  queueMicrotask(() => {
    Object.assign(after[2], { scrollTop, scrollLeft });
    if (focused >= 0) after[focused].focus({ preventScroll: true });
  });
}

function frame(figure) {
  const outer = document.createElement("figure"), caption = document.createElement("figcaption");
  const drawing = document.createElement("div"), words = document.createElement("p");
  outer.dataset.name = figure.name;
  caption.textContent = figure.title;
  Object.assign(words, { className: "quiet", textContent: figure.caption });
  Object.assign(drawing, { className: "drawing", tabIndex: 0 });
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", `${figure.title}. ${figure.caption}`);
  outer.append(caption, drawing, words, valueTable(figure));
  return outer;
}

// Axis titles and row names take their share of the width; panels of fixed cells are wrapped instead.
function fitted(figure, width) {
  const spec = structuredClone(figure.spec), config = figure.themes[DARK.matches ? "dark" : "light"];
  if (spec.columns !== undefined) return { ...spec, config, columns: width < 520 ? 1 : spec.columns };
  if (spec.spec !== undefined) spec.spec.width = Math.max(140, width - 170);
  else Object.assign(spec, { width, autosize: { type: "fit-x", contains: "padding" } });
  return { ...spec, config };
}

async function drawFigure(figure, outer) {
  const drawing = outer.querySelector(".drawing");
  await viewOf(fitted(figure, drawing.clientWidth), drawing, "svg").runAsync();
}

// The view of a Vega-Lite specification in a drawing (also of curves.js), not run yet.
function viewOf(spec, drawing, renderer) {
  // The drawing as a whole has a name; the marks in it have none, so they are hidden from assistive technology.
  const marks = document.createElement("div");
  marks.setAttribute("aria-hidden", "true");
  drawing.replaceChildren(marks);
  // The interpreter evaluates expressions without eval, which the page's policy forbids.
  return new vega.View(vega.parse(vegaLite.compile(spec).spec, null, { ast: true }), {
    expr: vega.expressionInterpreter, renderer, container: marks, hover: false, logLevel: vega.Error });
}

let figures = [];
function redraw() {
  for (const [figure, outer] of figures) {
    drawFigure(figure, outer).catch((error) => {
      outer.querySelector(".drawing").textContent = `This figure cannot be drawn here (${error.message}); its values are below.`;
    });
  }
}

async function readJson(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } }), body = await answer.json();
  if (!answer.ok) throw new Error(`${body.detail}; hint: ${body.hint}`);
  return body;
}

// What is there in place of figures. Figures that are drawn stay: the live part says that the server does not answer.
function sayFigures(place, text, isFailure) {
  if (figures.length) return;
  place.replaceChildren(...(text ? [Object.assign(document.createElement("p"),
    { className: isFailure ? "failure" : "empty", textContent: text })] : []));
}

// The address has the selection of the leaderboard, which its figure follows.
let listed = "";
async function showFigures() {
  const place = document.getElementById("figures"), query = location.search;
  if (place === null) return;
  if (listed === "") sayFigures(place, "Loading the figures.", false);
  try {
    const { items } = await readJson(place.dataset.figures + query), text = query + JSON.stringify(items);
    if (text !== listed) {
      const found = await Promise.all(items.map(({ name }) => readJson(`${place.dataset.figures}/${name}${query}`)));
      if (query !== location.search) return;  // another selection was made meanwhile, whose figures are on their way
      if (found.length) {
        await loaded();
        figures = found.map((one) => [one, frame(one)]);
        for (const [{ name }, outer] of figures) {
          const shown = place.querySelector(`figure[data-name="${CSS.escape(name)}"]`);
          if (shown !== null) keepTable(shown, outer);
        }
        place.replaceChildren(...figures.map(([, outer]) => outer));
        redraw();
      }
      listed = text;
    }
    sayFigures(place, place.dataset.empty, false);
  } catch (error) {
    listed = "";
    sayFigures(place, error instanceof TypeError ? "The server does not answer; load the page again for its figures."
      : `The figures cannot be shown: ${error.message}`, true);
  }
}

DARK.addEventListener("change", redraw);
let resized = 0, width = innerWidth;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => {
    if (innerWidth !== width) redraw();
    width = innerWidth;
  }, 200);
});

// The live part of a page: a stream has it whole, whenever it has changed. Its heartbeats say whether it is current.
const REDRAWN_MS = 5000, RETRY_MS = 2000;
const stale = document.getElementById("stale");
let stream = null, followed = null, drawn = Date.now(), due = 0;
let heard = new Date(), staleSince = null, silent = 0, intervalMs = 15000;  // until the first heartbeat has it

function warn(text) {
  if (stale.textContent !== text) stale.textContent = text;
  stale.hidden = text === "";
}

function notCurrentWords(since, reason) {  // curves.js says it too
  return `Not current since ${TIME_FORMAT.format(since)}: ${reason}`;
}

function notCurrent(since, reason) {
  staleSince ??= since;
  warn(notCurrentWords(staleSince, reason));
}

function current() {
  staleSince = null;
  warn("");
}

function ownText(node) {
  return [...node.childNodes].filter((one) => one.nodeType === Node.TEXT_NODE).map((one) => one.data.trim()).join("|");
}

// What has not changed stays in the document, with its selection, scrolling and focus.
function merge(shown, next) {
  if (shown.isEqualNode(next)) return;
  const before = [...shown.children], after = [...next.children];
  const alike = before.length > 0 && before.length === after.length && ownText(shown) === ownText(next)
    && before.every((one, place) => one.tagName === after[place].tagName);
  if (!alike) return shown.replaceWith(next);
  for (const name of shown.getAttributeNames()) if (!next.hasAttribute(name)) shown.removeAttribute(name);
  for (const { name, value } of next.attributes) if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  before.forEach((one, place) => merge(one, after[place]));
}

// Details with an id stay open or closed. The page's own script prepares the new part as it did the one in the document.
function replace(part) {
  const shown = document.getElementById(part.id);
  for (const one of shown.querySelectorAll("details[id]")) {
    const same = part.querySelector(`#${CSS.escape(one.id)}`);
    if (same !== null) same.open = one.open;
  }
  localTimes(part);
  document.dispatchEvent(new CustomEvent("replacing", { detail: part }));
  merge(shown, part);
}

function put(html) {
  for (const part of [...new DOMParser().parseFromString(html, "text/html").body.children]) replace(part);
}

function drawAgain(now) {
  const rest = drawn + REDRAWN_MS - Date.now();
  clearTimeout(due);
  if (!now && rest > 0) {  // none after the last change is missed
    due = setTimeout(drawAgain, rest, true);
    return;
  }
  drawn = Date.now();
  document.dispatchEvent(new Event("live"));  // curves.js
  showFigures();
}

function stop() {
  clearTimeout(silent);
  stream?.close();
  stream = null;
}

// A connection of which one end is gone stays open without an error: two intervals without a message end it.
function listen(path) {
  clearTimeout(silent);
  silent = setTimeout(() => {
    notCurrent(heard, "the server does not answer; trying again");
    stop();
    follow(path);
  }, 2 * intervalMs);
}

function follow(path) {
  followed = path;
  if (stream !== null || document.hidden) return;
  const one = stream = new EventSource(path), hear = (type, act) => one.addEventListener(type, (event) => {
    heard = new Date();
    listen(path);
    act(JSON.parse(event.data));
  });
  heard = new Date();
  listen(path);
  hear("heartbeat", ({ interval_s, stale }) => {
    intervalMs = 1000 * interval_s;
    if (stale === null) current(); else notCurrent(new Date(stale.since), stale.reason);
  });
  hear("live", (html) => { put(html); drawAgain(false); });
  hear("end", () => { stop(); current(); drawAgain(true); });
  hear("deleted", () => { stop(); warn("Deleted"); });
  one.addEventListener("error", () => {
    notCurrent(new Date(), "the server does not answer; trying again");
    if (one.readyState !== EventSource.CLOSED) return;  // else the browser connects again
    stop();
    setTimeout(check, RETRY_MS, path);
  });
}

// A refusal ends an EventSource and has no status: one more request shows it.
async function check(path) {
  try {
    const answer = await fetch(path, { signal: AbortSignal.timeout(2 * intervalMs) });
    if (path !== followed) return;
    if (answer.status === 401 || answer.status === 403) return warn("Signed out: load the page again");
    if (answer.status === 404) return warn("Deleted");
    if (answer.ok) answer.body.cancel(); else notCurrent(new Date(), (await answer.json()).detail);
  } catch { /* nobody answered: followed again until somebody does */ }
  if (path === followed) follow(path);
}

function signIn(form) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const refused = document.getElementById("refused");
    refused.textContent = "";
    try {
      const answer = await fetch("/console/sign-in", {
        method: "POST", headers: { authorization: `Bearer ${form.elements.key.value.trim()}` } });
      if (answer.ok) return location.reload();
      const problem = await answer.json();
      refused.textContent = `${problem.detail}: ${problem.hint}`;
    } catch {
      refused.textContent = "The server does not answer.";
    }
    form.elements.key.focus();
  });
}

function send(method, path, body) {
  const token = document.querySelector("meta[name=eyrie-change]"), headers = { "content-type": "application/json" };
  if (token !== null) headers["eyrie-change"] = token.content;
  return fetch(path, { method, headers, body });
}

async function signOut(to) {
  try {
    const answer = await send("POST", "/console/sign-out");
    if (answer.ok || answer.status === 401) return location.assign(to);
    warn(`Not signed out: ${(await answer.json()).detail}`);
  } catch {
    warn("Not signed out: the server does not answer");
  }
}

async function act(button) {
  if (!confirm(button.dataset.question)) return;
  const outcome = document.getElementById("outcome");
  button.disabled = true;
  outcome.textContent = `${button.textContent}: sent`;
  try {
    const answer = await send(button.dataset.method, button.dataset.path, button.dataset.body);
    if (answer.status === 204) return location.assign("/");
    if (answer.ok) {  // what was done to an endpoint is seen on its page, also of a promotion from the page of a job
      const changed = await answer.json();
      return changed.kind === "DraftEndpoint" ? location.assign(`/console/endpoints/${changed.name}`) : location.reload();
    }
    const problem = await answer.json();
    outcome.textContent = `${button.textContent}: ${problem.detail}: ${problem.hint}`;
  } catch {
    outcome.textContent = "The server does not answer.";
  }
  button.disabled = false;
}

// The document of a new job: checked by the server a moment after the last key, planned, then started.
function newJob(form) {
  const text = form.elements.text, verdict = document.getElementById("verdict");
  let waiting = 0, latest = 0;

  function say(title, lines, good) {
    const head = document.createElement("p"), list = document.createElement("ul");
    head.textContent = title;
    for (const line of lines) list.append(Object.assign(document.createElement("li"), { textContent: line }));
    verdict.className = good ? "" : "failure";
    verdict.replaceChildren(head, ...(lines.length ? [list] : []));
  }

  // The form (form.js) shows errors beside their fields and takes them out of the list.
  function unplaced(errors) {
    const checked = new CustomEvent("checked", { detail: { errors } });
    form.dispatchEvent(checked);
    return checked.detail.errors;
  }

  function refused(problem) {
    const faults = unplaced(problem.errors).map((one) => Object.entries(one).map(([name, value]) =>
      `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", "));
    say(`${problem.detail}${problem.hint ? `; hint: ${problem.hint}` : ""}`, faults, false);
  }

  function planned(plan) {
    unplaced([]);
    const hours = plan.total_hours < 1 ? `${Math.ceil(plan.total_hours * 60)} minutes` : `${plan.total_hours.toFixed(1)} hours`;
    const stages = plan.stages.map((one) => `${one.stage}${one.key ? ` ${one.key}` : ""}: ${one.tokens.toLocaleString()} tokens, ${one.hours.toFixed(2)} h`);
    say(`Valid. About ${hours}, ${(plan.total_bytes_on_disk / 1e9).toFixed(2)} GB on disk. ${plan.bottleneck}`,
      [...stages, ...(plan.present ? [plan.present.words] : []),
        ...(plan.total_store_cost === null ? [] : [`object store: ${plan.total_store_cost.toFixed(2)}, then ${plan.store_month_cost.toFixed(2)} a month`]), ...plan.warnings.map((one) => `warning: ${one}`)], true);
  }

  function json() {
    try {
      JSON.parse(text.value);
      return true;
    } catch (error) {
      say(`Not JSON: ${error.message}`, [], false);
      return false;
    }
  }

  async function post(path, done) {
    const mine = ++latest;
    try {
      const answer = await send("POST", path, text.value), body = await answer.json();
      if (mine !== latest) return;
      if (answer.ok) done(body); else refused(body);
    } catch {
      if (mine !== latest) return;
      unplaced([]);
      say("The server does not answer.", [], false);
    }
  }

  function check() {
    if (json()) post("/v1alpha1/plans", planned);
  }

  text.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(check, 500);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(waiting);
    if (json()) post("/v1alpha1/jobs", (job) => location.assign(`/console/jobs/${job.id}`));
  });
  check();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-path]");
  if (button !== null) act(button);
  const out = event.target.closest("[data-sign-out]");
  if (out !== null) {  // a link without script leads to a page with the button
    event.preventDefault();
    signOut(out.dataset.signOut);
  }
});
localTimes(document);
showFigures();
const live = document.querySelector("[data-stream]");
if (live !== null) {
  follow(live.dataset.stream);
  // A browser opens six connections to a server: hidden pages must not use them up.
  document.addEventListener("visibilitychange", () => document.hidden ? stop() : follow(followed));
}
const form = document.getElementById("sign-in"), made = document.getElementById("new-job");
if (form !== null) signIn(form);
if (made !== null) newJob(made);
