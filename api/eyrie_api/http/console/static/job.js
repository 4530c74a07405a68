// The page of a job: log tails of its stages, its plan, its files as they come, and the leaderboard sorted and filtered.
// `replacing` (console.js) has each new live part before it is shown: it is prepared like the one in the document.

const MOST_LINES = 500, MOST_CHARACTERS = 65536;
const logs = new Map();  // of open logs, by the id of their details

function fill(details, log) {
  const pre = details.querySelector("pre"), note = details.querySelector(".note");
  if (note.textContent !== log.note) note.textContent = log.note;
  note.classList.toggle("failure", log.failed);
  pre.hidden = log.text === "";
  if (pre.textContent === log.text) return;
  const atEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4;
  pre.textContent = log.text;
  if (atEnd) pre.scrollTop = pre.scrollHeight;
}

function showLog(id) {
  const details = document.getElementById(id);
  if (details !== null && logs.has(id)) fill(details, logs.get(id));
}

function addTo(log, text) {
  const all = (log.text + text).slice(-MOST_CHARACTERS).split("\n");
  log.cut ||= log.text.length + text.length > MOST_CHARACTERS || all.length > MOST_LINES;
  log.text = all.slice(-MOST_LINES).join("\n");
}

async function readLog(details) {
  const { id } = details, follows = details.hasAttribute("data-running"), control = new AbortController();
  // Of a stage that has written nothing yet, the answer may begin with its first output.
  const loading = follows ? "Waiting for output of the stage." : "Loading the log.";
  const log = { text: "", note: loading, failed: false, cut: false, busy: true, control, attempt: details.dataset.attempt };
  logs.get(id)?.control.abort();
  logs.set(id, log);
  showLog(id);
  try {
    const answer = await fetch(details.dataset.log + (follows ? "&follow=true" : ""), { signal: control.signal });
    if (answer.ok) {
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
        addTo(log, piece.value);
        log.note = follows ? "The last lines; more appear as they are written." : loading;
        showLog(id);
      }
      log.note = log.text === "" ? "The log is empty." : log.cut ? `The last ${log.text.split("\n").length} lines.` : "";
    } else {
      const problem = await answer.json();
      Object.assign(log, { failed: true, note: `${problem.detail}${problem.hint ? `; hint: ${problem.hint}` : ""}` });
    }
  } catch {
    if (control.signal.aborted) return;
    Object.assign(log, { failed: true, note: "The log was not read to its end. Close it and open it again." });
  }
  log.busy = false;
  showLog(id);
}

function closeLog(id) {
  logs.get(id)?.control.abort();
  logs.delete(id);
}

function openLogs() {
  for (const one of document.querySelectorAll("details.log[open]")) if (!logs.has(one.id)) readLog(one);
}

// A part of the document that is replaced loses its scrolling and focus: they are set again after it.
function keepPlace(shown) {
  const focusable = (details) => [...details.querySelectorAll("summary, a, pre")];
  const before = focusable(shown), { scrollTop } = shown.querySelector("pre"), focused = before.indexOf(document.activeElement);
  queueMicrotask(() => {
    if (shown.isConnected) return;
    const details = document.getElementById(shown.id);
    if (details === null) return;
    details.querySelector("pre").scrollTop = scrollTop;
    if (focused >= 0) focusable(details)[focused]?.focus({ preventScroll: true });
  });
}

// An open log stays, unless its stage was started again or it could not be read while the stage runs.
function keepLogs(part) {
  for (const [id, log] of logs) {
    const details = part.querySelector(`#${CSS.escape(id)}`);
    if (details === null) { closeLog(id); continue; }
    const again = log.attempt !== details.dataset.attempt || log.failed && !log.busy && details.hasAttribute("data-running");
    if (again) setTimeout(() => { if (logs.get(id) === log) readLog(document.getElementById(id)); });
    fill(details, log);
    keepPlace(document.getElementById(id));
  }
}

// Numbers begin with the largest; the rank, which is the order of the server, decides between equal ones.
let sorted = { column: 0, direction: "ascending" };
const LEADERBOARD = "section[aria-labelledby=leaderboard]";

function number(row, column) {
  const value = parseFloat(row.cells[column].textContent);
  return Number.isNaN(value) ? null : value;
}

function compared(one, other, column, isNumber) {
  const sign = sorted.direction === "ascending" ? 1 : -1;
  if (!isNumber) {
    return sign * one.cells[column].textContent.localeCompare(other.cells[column].textContent, undefined, { numeric: true });
  }
  const [mine, theirs] = [number(one, column), number(other, column)];
  if (mine === null || theirs === null) return (mine === null) - (theirs === null);
  return sign * (mine - theirs);
}

function arrange(section) {
  const table = section.querySelector("table"), heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, place) => {
    if (place === sorted.column) head.setAttribute("aria-sort", sorted.direction); else head.removeAttribute("aria-sort");
  });
  const isNumber = heads[sorted.column].classList.contains("n");
  const rows = [...body.rows].sort((one, other) =>
    compared(one, other, sorted.column, isNumber) || number(one, 0) - number(other, 0));
  body.append(...rows);
}

function prepareLeaderboard(root) {
  const section = root.querySelector(LEADERBOARD);
  if (section === null) return;
  for (const head of section.querySelectorAll("thead th")) {
    head.scope = "col";
    head.replaceChildren(Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent }));
  }
  arrange(section);
}

// The server ranks by the selection. The address has it, and so has the stream of the live part, which brings the rows.
function selectRows(form) {
  const chosen = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
  const query = chosen.size ? `?${chosen}` : "";
  history.replaceState(null, "", location.pathname + query);
  form.closest(LEADERBOARD).setAttribute("aria-busy", "true");
  document.getElementById("selecting").textContent = "Loading this selection.";
  stop();
  follow(`${location.pathname}/live${query}`);
  showFigures();
}

// Files and reports are not part of the stream, which is rendered at every change: they are read again when a stage has
// finished.
async function readParts(path, ...ids) {
  const answer = await fetch(path, { headers: { accept: "text/html" } });
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const parts = ids.map((id) => page.getElementById(id));
  if (parts.includes(null)) throw new Error(`the answer has not all of ${ids}`);
  return parts;
}

function finished(root) {
  return root.querySelectorAll('.pipeline a[href="#files"]').length;
}

let seen = finished(document);
async function readFiles(count) {
  if (count === seen) return;
  const before = seen;
  seen = count;
  try {
    for (const part of await readParts(location.pathname, "reports", "files")) replace(part);
  } catch {
    seen = before;  // with the next part that arrives
  }
}

async function readPlan(details) {
  const place = details.querySelector("div");
  place.replaceChildren(Object.assign(document.createElement("p"), { className: "empty", textContent: "Loading." }));
  try {
    place.replaceChildren(...await readParts(details.dataset.plan, "plan-table"));
  } catch {
    place.replaceChildren(Object.assign(document.createElement("p"), {
      className: "failure", textContent: "The server does not answer. Close this and open it again." }));
  }
}

document.addEventListener("replacing", ({ detail: part }) => {
  if (part.id !== "live") return;
  keepLogs(part);
  prepareLeaderboard(part);
  readFiles(finished(part));
});
document.addEventListener("toggle", ({ target }) => {
  if (!target.isConnected) return;
  if (target.id === "plan" && target.open) readPlan(target);
  if (!target.matches(".log")) return;
  if (!target.open) return closeLog(target.id);
  if (!logs.has(target.id)) target.querySelector(".tail").scrollIntoView({ block: "nearest" });  // it may be below the graph
  openLogs();
}, true);
document.addEventListener("click", ({ target }) => {
  const button = target.closest(`${LEADERBOARD} th button`);
  if (button === null) return;
  const head = button.parentElement, column = head.cellIndex;
  const first = head.classList.contains("n") && column !== 0 ? "descending" : "ascending";
  const other = { ascending: "descending", descending: "ascending" };
  sorted = { column, direction: column === sorted.column ? other[sorted.direction] : first };
  arrange(head.closest(LEADERBOARD));
});
document.addEventListener("change", ({ target }) => {
  if (target.form?.id === "selection") selectRows(target.form);
});
// Hidden pages follow nothing: a browser opens six connections to a server.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return openLogs();
  for (const [id, log] of logs) if (log.busy) closeLog(id);
});
prepareLeaderboard(document);
