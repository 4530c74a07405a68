// Curves of the training: of one drafter, of the runs of a sweep, or of several jobs. uPlot draws them.
"use strict";

const CHARTS = [
  ["Loss", /^(evaluation_)?loss$/], ["Acceptance by position", /^acceptance\/\d+$/], ["Accuracy by position", /^accuracy\/\d+$/],
  ["Theoretical speed-up by depth", /^theoretical_speedup/], ["Learning rate", /^learning_rate$/], ["Gradient norm", /^grad_norm$/],
  ["Tokens per second", /^tokens_per_s$/],
];
const LAST_VALUES = [["Loss", "loss"], ["Evaluation loss", "evaluation_loss"], ["Speed-up", "theoretical_speedup"]];
const COLOURS = ["#3b82f6", "#d97706", "#10b981", "#e11d48", "#8b5cf6", "#0891b2", "#65a30d", "#db2777"];
const DASHES = [[], [8, 4], [2, 3], [12, 3, 2, 3], [5, 2], [1, 5], [14, 5], [8, 3, 2, 3, 2, 3]];
const STROKES = ["solid", "dashed", "dotted", "dash-dot", "short dashes", "sparse dots", "longest dashes", "dash-dot-dot"];
const MAX_POINTS = 1000, MAX_COLUMNS = 10000, MAX_LEGEND = 12, REFRESH_MS = 5000;

// Pure functions.

// One column per step that a series has, null where another has none: uPlot's form. Of several steps in a column, if
// there are more of them than columns, a series keeps the value furthest from the one before, so that spikes stay.
function aligned(series, most = MAX_COLUMNS) {
  const steps = [...new Set(series.flatMap((one) => one.points.map((point) => point.step)))].sort((a, b) => a - b);
  const stride = Math.max(1, Math.ceil(steps.length / most)), column = new Map();
  steps.forEach((step, place) => column.set(step, Math.floor(place / stride)));
  return [steps.filter((_, place) => place % stride === 0), ...series.map((one) => {
    const values = new Array(Math.ceil(steps.length / stride)).fill(null);
    let before = null, latest = -1;
    for (const point of one.points) {
      const at = column.get(point.step);
      if (at !== latest && latest >= 0) before = values[latest];
      if (at !== latest || Math.abs(point.value - before) > Math.abs(values[at] - before)) values[at] = point.value;
      latest = at;
    }
    return values;
  })];
}

// Exponential moving average, corrected for its start: the first value is the first average. Nulls stay null.
function smoothed(values, weight) {
  let sum = 0, share = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

// 1 + acceptance[0] + acceptance[0] * acceptance[1] + ...: what `theoretical_speedup` is at the deepest position, for the
// depths before it. At steps that all positions of a depth have.
function speedupByDepth(acceptance) {
  let chained = new Map(), sums = new Map();
  return acceptance.slice(0, -1).map((one, place) => {
    const product = (point) => place === 0 ? point.value : chained.get(point.step) * point.value;
    const points = one.points.filter((point) => place === 0 || chained.has(point.step));
    const products = new Map(points.map((point) => [point.step, product(point)]));
    sums = new Map(points.map((point) => [point.step, (sums.get(point.step) ?? 1) + products.get(point.step)]));
    chained = products;
    return { ...one, name: `theoretical_speedup/${place + 1}`,
      points: points.map((point) => ({ ...point, value: sums.get(point.step) })) };
  });
}

function nearest(values, place) {
  for (let away = 0; away < values.length; away++) {
    if (values[place - away] != null) return place - away;
    if (values[place + away] != null) return place + away;
  }
  return null;
}

function short(value) {
  if (value == null) return "";
  const rounded = Number(value.toPrecision(4));
  return rounded !== 0 && Math.abs(rounded) < 1e-3 ? rounded.toExponential() : String(rounded);
}

// Runs by job and key, each with its series by name.
function runsOf(answers) {
  const runs = new Map();
  for (const { job, items } of answers) {
    for (const one of items) {
      if (one.points.length === 0) continue;
      const id = `${job.id}/${one.key}`;
      const label = [answers.length > 1 ? job.name : "", one.key].filter(Boolean).join(" ") || "training";
      if (!runs.has(id)) runs.set(id, { id, label, job: job.id, series: new Map() });
      runs.get(id).series.set(one.name, one);
    }
  }
  for (const { series } of runs.values()) {
    const acceptance = [];
    while (series.has(`acceptance/${acceptance.length}`)) acceptance.push(series.get(`acceptance/${acceptance.length}`));
    for (const one of speedupByDepth(acceptance)) series.set(one.name, one);
  }
  const byNumber = new Intl.Collator(undefined, { numeric: true });
  // `loss` before `evaluation_loss`: the first of a chart is the undashed one.
  return [...runs.values()].map(({ series, ...run }) =>
    ({ ...run, series: new Map([...series].sort(([one], [other]) => one.length - other.length)) }))
    .sort((one, other) => byNumber.compare(one.label, other.label));
}

// What the rungs of sweeps decided, by step and job: the runs that went on and those that ended.
function rungsOf(runs) {
  const rungs = new Map();
  for (const run of runs) {
    for (const { step, value } of run.series.get("rung")?.points ?? []) {
      const id = `${run.job}/${step}`;
      if (!rungs.has(id)) rungs.set(id, { step, job: run.job, on: [], ended: [] });
      rungs.get(id)[value > 0 ? "on" : "ended"].push(run);
    }
  }
  return [...rungs.values()].sort((one, other) => one.step - other.step);
}

function isEnded(run) {
  return run.series.get("rung")?.points.at(-1).value === 0;
}

// The page.

const curves = document.getElementById("curves");
const inScheme = matchMedia("(prefers-color-scheme: dark)");
const log = document.getElementById("curves-log"), smoothing = document.getElementById("curves-smoothing");
const plots = new Map(), rows = new Map();
let runs = [], rungs = [];

function cellOf(row, text, number) {
  return Object.assign(row.insertCell(), { textContent: text, className: number ? "n" : "" });
}

// Rows stay when newer values arrive, with their checkboxes and the focus.
function listRuns() {
  const body = document.querySelector("#curves-runs tbody");
  for (const run of runs) {
    if (!rows.has(run.id)) {
      const row = body.insertRow(), label = document.createElement("label"), swatch = document.createElement("span");
      const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: true });
      box.addEventListener("change", draw);
      swatch.className = "swatch";
      label.append(box, swatch, run.label);
      row.insertCell().append(label);
      cellOf(row, "", true);
      LAST_VALUES.forEach(() => cellOf(row, "", true));
      const colour = COLOURS[rows.size % COLOURS.length];
      swatch.style.background = colour;
      rows.set(run.id, { row, box, swatch, colour });
    }
    const { row, swatch } = rows.get(run.id);
    swatch.hidden = runs.length === 1;
    const latest = (name) => run.series.get(name)?.points.at(-1);
    row.cells[1].textContent = Math.max(...[...run.series.values()].map((one) => one.points.at(-1).step));
    LAST_VALUES.forEach(([, name], column) => { row.cells[column + 2].textContent = short(latest(name)?.value) || "-"; });
  }
}

function listRungs() {
  const found = rungsOf(runs), said = document.getElementById("curves-rungs");
  const names = (of) => of.map((run) => run.label).join(", ");
  const items = found.map(({ step, on, ended }) => Object.assign(document.createElement("li"), { textContent:
    `Step ${step}: ${on.length} of ${on.length + ended.length} went on (${names(on) || "none"}), `
      + `${ended.length} ended (${names(ended) || "none"})` }));
  said.hidden = items.length === 0;
  const list = said.querySelector("ul");
  if (list.textContent !== items.map((one) => one.textContent).join("")) list.replaceChildren(...items);
}

// Lines at the rungs of the chosen runs, and a cross where one ended a run.
function drawRungs(plot) {
  const { ctx, bbox } = plot, ink = getComputedStyle(document.body).color, half = 4 * devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.strokeStyle = ink;
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const step of new Set(rungs.map((one) => one.step))) {
    const x = Math.round(plot.valToPos(step, "x", true)) + 0.5;  // on one column of pixels
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.setLineDash([]);
  ctx.lineWidth = 2 * devicePixelRatio;
  plot.series.forEach((one, number) => {
    if (number === 0 || !one.ended || one.class === "raw") return;
    const values = plot.data[number], last = values.findLastIndex((value) => value != null);
    if (last < 0) return;
    const x = plot.valToPos(plot.data[0][last], "x", true), y = plot.valToPos(values[last], "y", true);
    ctx.beginPath();
    for (const side of [-half, half]) {
      ctx.moveTo(x - half, y - side);
      ctx.lineTo(x + half, y + side);
    }
    ctx.stroke();
  });
  ctx.restore();
}

function valuesOf(series) {
  const details = document.createElement("details"), summary = document.createElement("summary");
  const scroll = document.createElement("div");
  summary.textContent = "Values";
  Object.assign(scroll, { className: "scroll tall", tabIndex: 0 });
  scroll.setAttribute("role", "region");
  details.append(summary, scroll);
  details.fill = () => {
    if (!details.open) return;
    const table = document.createElement("table"), head = table.createTHead().insertRow(), body = table.createTBody();
    scroll.setAttribute("aria-label", `Values: ${details.closest("figure").querySelector("figcaption").textContent}`);
    for (const name of ["Series", "Latest", "at step", "First", "Least", "Greatest"]) {
      head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: name }));
    }
    for (const one of details.series) {
      const row = body.insertRow(), values = one.points.map((point) => point.value), last = one.points.at(-1);
      cellOf(row, one.label, false);
      for (const text of [short(last.value), last.step, short(values[0]), short(Math.min(...values)), short(Math.max(...values))]) {
        cellOf(row, text, true);
      }
    }
    scroll.replaceChildren(table);
  };
  details.series = series;
  details.addEventListener("toggle", details.fill);
  return details;
}

// What uPlot gets for series: their options and data. With smoothing each has two lines, the raw one faint below; of many
// the raw ones are left out, since they would hide the smoothed ones.
function drawing(series, isLog, weight) {
  const [steps, ...raw] = aligned(series);
  const values = isLog ? raw.map((one) => one.map((value) => value > 0 ? value : null)) : raw;
  const width = series.length > MAX_LEGEND ? 1 : 1.5;  // 100 lines without a GPU: 0.05 s instead of 1.2 s
  const style = (one) => ({ label: one.label, stroke: one.colour, dash: one.dash, ended: one.ended, width, spanGaps: true,
    points: { show: steps.length < 30, size: 5, fill: one.colour }, value: (_, value) => short(value) });
  if (weight === 0) return { options: series.map(style), data: [steps, ...values] };
  const averaged = values.map((one) => smoothed(one, weight));
  if (series.length > MAX_LEGEND) return { options: series.map(style), data: [steps, ...averaged] };
  const faint = series.map((one) => ({ ...style(one), stroke: `${one.colour}50`, width: 1, class: "raw", points: { show: false } }));
  return { options: [...faint, ...series.map(style)], data: [steps, ...values, ...averaged] };
}

function newPlot(figure, series, made, isLog, said) {
  const style = getComputedStyle(document.body), ink = style.color, rule = style.getPropertyValue("--rule").trim();
  const line = { stroke: rule, width: 1 }, texts = (_, splits) => splits.map(short);
  let pointed = null;  // the number of the series that the pointer is near
  const say = (plot) => {
    const place = pointed ? plot.cursor.idxs[pointed] : null;
    said.textContent = place == null ? said.dataset.key :
      `${plot.series[pointed].label}: ${short(plot.data[pointed][place])} at step ${plot.data[0][place]}`;
  };
  return new uPlot({
    width: Math.max(240, figure.clientWidth - 26), height: 220,
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    axes: [{ stroke: ink, grid: line, ticks: line, label: "optimiser step" },
      { stroke: ink, grid: line, ticks: line, values: texts, size: 58 }],
    legend: { show: runs.length === 1 && series.length <= MAX_LEGEND },
    focus: { alpha: 0.25 },
    cursor: { focus: { prox: 24 }, dataIdx: (plot, number, place) =>
      number === 0 ? place : made.options[number - 1].class === "raw" ? null : nearest(plot.data[number], place) },
    hooks: { draw: [drawRungs], setCursor: [say], setSeries: [(plot, number, options) => {
      if (options.focus) pointed = number;
      say(plot);
    }] },
    series: [{ label: "step" }, ...made.options],
  }, made.data, figure);
}

function place(title, series, isLog, weight) {
  const shape = JSON.stringify([series.map((one) => [one.label, one.colour, one.ended]), isLog, weight > 0, inScheme.matches, innerWidth]);
  const made = drawing(series, isLog, weight), before = plots.get(title);
  if (before?.shape === shape) {
    const { plot, values } = before, { min, max } = plot.scales.x, steps = plot.data[0];
    const zoomed = min > steps[0] || max < steps.at(-1);
    plot.setData(made.data, !zoomed);
    if (zoomed) plot.setScale("x", { min, max });
    values.series = series;
    values.fill();
    return;
  }
  const figure = before?.figure ?? document.createElement("figure");
  if (before === undefined) {
    figure.append(Object.assign(document.createElement("figcaption"), { textContent: title }));
    const after = CHARTS.slice(CHARTS.findIndex(([one]) => one === title) + 1).map(([one]) => plots.get(one)?.figure).find(Boolean);
    document.getElementById("curves-charts").insertBefore(figure, after ?? null);
  }
  const open = before?.values.open ?? false, { min, max } = before?.plot.scales.x ?? {}, steps = before?.plot.data[0];
  before?.plot.destroy();
  before?.said.remove();
  before?.values.remove();
  const said = Object.assign(document.createElement("p"), { className: "quiet nearest" }), values = valuesOf(series);
  const names = [...new Set(series.map((one) => one.name))];
  said.dataset.key = runs.length > 1 && names.length > 1 ? `Lines: ${names.map((one, number) =>
    `${one} ${STROKES[number % STROKES.length]}`).join(", ")}` : "";
  said.textContent = said.dataset.key;
  const plot = newPlot(figure, series, made, isLog, said);
  if (before && (min > steps[0] || max < steps.at(-1))) plot.setScale("x", { min, max });
  figure.append(said, values);
  values.open = open;
  plots.set(title, { figure, plot, said, values, shape });
}

function draw() {
  const chosen = runs.filter((run) => rows.get(run.id).box.checked), all = document.getElementById("curves-all");
  all.checked = chosen.length === runs.length;
  all.indeterminate = chosen.length > 0 && !all.checked;
  document.getElementById("curves-empty").hidden = chosen.length > 0;
  document.getElementById("curves-empty").textContent = runs.length ? "No run is chosen." : "No metrics yet.";
  const weight = Number(smoothing.value);
  rungs = rungsOf(chosen);
  for (const [title, pattern] of CHARTS) {
    const series = chosen.flatMap((run) => [...run.series.values()].filter((one) => pattern.test(one.name)).map((one, number) => ({
      points: one.points, name: one.name, ended: isEnded(run), label: runs.length > 1 ? `${run.label} ${one.name}` : one.name,
      // Of one run its series have colours; of several the runs have them, as in the table, and their series are dashed.
      colour: runs.length > 1 ? rows.get(run.id).colour : COLOURS[number % COLOURS.length],
      dash: runs.length > 1 ? DASHES[number % DASHES.length] : [] })));
    if (series.length === 0) {
      plots.get(title)?.plot.destroy();
      plots.get(title)?.figure.remove();
      plots.delete(title);
    } else {
      // Nothing positive has no place on a logarithmic axis.
      place(title, series, log.checked && series.some((one) => one.points.some((point) => point.value > 0)), weight);
    }
  }
}

const jobs = curves === null ? [] : JSON.parse(curves.dataset.jobs);
let answers = [], restUntil = 0, queued = false, asked = Promise.resolve(), unanswered = null;

// What could not be read, and since when: curves that are drawn stay.
function sayFailed(text) {
  const failed = document.getElementById("curves-failed");
  failed.textContent = text;
  failed.hidden = text === "";
  if (text && runs.length === 0) document.getElementById("curves-empty").hidden = true;
}

async function refresh() {
  const began = Date.now(), refused = [];
  try {
    answers = await Promise.all(jobs.map(async (job, number) => {
      if (answers[number] !== undefined && job.ended) return answers[number];
      const path = `/v1alpha1/jobs/${job.id}`, headers = { accept: "application/json" };
      // The state first: what the last metrics are is certain only after the end.
      if (curves.dataset.follow !== undefined && !job.ended) {
        const found = await fetch(path, { headers });
        if (found.ok) job.ended = (await found.json()).status.finished_at !== null;
      }
      const answer = await fetch(`${path}/metrics?stage=train&max_points=${MAX_POINTS}`, { headers });
      const body = await answer.json();
      if (answer.ok) return { job, items: body.items };
      refused.push(`${job.name}: ${body.detail}; hint: ${body.hint}`);
      return answers[number] ?? { job, items: [] };
    }));
  } catch {
    unanswered ??= new Date();
    const isTriedAgain = curves.dataset.follow !== undefined || document.querySelector("[data-stream]") !== null;
    sayFailed(`No answer since ${unanswered.toLocaleTimeString()}; ${isTriedAgain ? "trying again" : "load the page again"}`);
    return;
  } finally {
    restUntil = Date.now() + 4 * (Date.now() - began);  // a large sweep must not keep the server busy
  }
  unanswered = null;
  runs = runsOf(answers);
  for (const part of curves.querySelectorAll("[data-with-runs]")) part.hidden = runs.length === 0;
  listRuns();
  listRungs();
  draw();
  sayFailed(refused.join(". "));
}

// One refresh at a time. One more is queued, so that none after the last change is missed.
function refreshSoon() {
  if (queued) return;
  queued = true;
  const rest = () => new Promise((done) => setTimeout(done, Math.max(0, restUntil - Date.now())));
  asked = asked.catch(() => {}).then(rest).then(() => { queued = false; return refresh(); });
}

async function followJobs() {
  if (!document.hidden) await refresh();
  if (unanswered !== null || jobs.some((job) => !job.ended)) setTimeout(followJobs, Math.max(REFRESH_MS, restUntil - Date.now()));
}

if (curves !== null) {
  document.getElementById("curves-empty").textContent = "Loading the metrics.";
  log.addEventListener("change", draw);
  smoothing.addEventListener("input", () => {
    document.getElementById("curves-weight").textContent = Number(smoothing.value).toFixed(2);
    draw();
  });
  document.getElementById("curves-all").addEventListener("change", (event) => {
    for (const { box } of rows.values()) box.checked = event.target.checked;
    draw();
  });
  inScheme.addEventListener("change", draw);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 200); });
  if (curves.dataset.follow === undefined) {
    document.addEventListener("live", refreshSoon);  // console.js follows the job's page
    refreshSoon();
  } else followJobs();
}
