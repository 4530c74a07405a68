// Curves of the training: of one drafter, of the runs of a sweep, or of several jobs. `GET .../curves` says which charts
// there are, with their words and values; uPlot draws them.
"use strict";

const MAX_COLUMNS = 10000, MAX_LEGEND = 12, MAX_ROWS = 50, REFRESH_MS = 5000;

// Pure functions.

// One column per step that a series has, null where another has none: uPlot's form. Of several steps in a column, if
// there are more of them than columns, a series keeps the value furthest from the one before, so that spikes stay.
function aligned(series, most = MAX_COLUMNS) {
  const steps = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const stride = Math.max(1, Math.ceil(steps.length / most)), column = new Map();
  steps.forEach((step, place) => column.set(step, Math.floor(place / stride)));
  return [steps.filter((_, place) => place % stride === 0), ...series.map((one) => {
    const values = new Array(Math.ceil(steps.length / stride)).fill(null);
    let before = null, latest = -1;
    one.values.forEach((value, place) => {
      const at = column.get(one.steps[place]);
      if (at !== latest && latest >= 0) before = values[latest];
      if (at !== latest || Math.abs(value - before) > Math.abs(values[at] - before)) values[at] = value;
      latest = at;
    });
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

// The steps from first to last that series have, and how many there are. Of more than most, one of each of equal parts:
// the latest of those at which most series have a value.
function someSteps(series, first, last, most = MAX_ROWS) {
  const having = new Map();
  for (const { steps } of series) {
    for (const step of steps) if (first <= step && step <= last) having.set(step, (having.get(step) ?? 0) + 1);
  }
  const all = [...having.keys()].sort((a, b) => a - b), parts = Math.min(most, all.length);
  const part = (number) => all.slice(Math.floor(number * all.length / parts), Math.floor((number + 1) * all.length / parts));
  const chosen = (steps) => steps.reduce((best, step) => having.get(step) >= having.get(best) ? step : best);
  return [Array.from({ length: parts }, (_, number) => chosen(part(number))), all.length];
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

// Runs of all jobs, each with its curves by chart.
function runsOf(answers) {
  return answers.flatMap(({ job, found }) => found.runs.map((run) => ({
    ...run, id: `${job.id}/${run.key}`, label: jobs.length > 1 ? [job.name, run.key].filter(Boolean).join(" ") : run.label,
    curves: found.charts.map((chart) => chart.curves.filter((one) => one.key === run.key)) })));
}

// What the rungs of sweeps decided, with the ids of the runs.
function rungsOf(answers) {
  const ids = (job, keys) => keys.map((key) => `${job.id}/${key}`);
  return answers.flatMap(({ job, found }) => found.rungs.map(({ step, went_on, ended }) =>
    ({ step, on: ids(job, went_on), ended: ids(job, ended) }))).sort((one, other) => one.step - other.step);
}

// The page.

const curves = document.getElementById("curves");
const inScheme = matchMedia("(prefers-color-scheme: dark)");
const log = document.getElementById("curves-log"), smoothing = document.getElementById("curves-smoothing");
const ends = ["from", "to"].map((end) => document.getElementById(`curves-${end}`));
const plots = new Map(), rows = new Map();
let definition = null, runs = [], rungs = [], rungSteps = [];
// The first and last step of the chosen runs, and those that all charts show: null where they show all up to that end.
let whole = [0, 0], shown = [null, null];

// Colours are those of the charts that are files.
function colourOf(number) {
  const colours = definition.colours[inScheme.matches ? "dark" : "light"];
  return colours[number % colours.length];
}

function dashOf(number) {
  return definition.dashes[number % definition.dashes.length];
}

function cellOf(row, text, number) {
  return Object.assign(row.insertCell(), { textContent: text, className: number ? "n" : "" });
}

// Rows stay when newer values arrive, with their checkboxes and the focus.
function listRuns() {
  const body = document.querySelector("#curves-runs tbody"), head = document.querySelector("#curves-runs thead tr");
  for (const { title } of runs[0]?.latest.slice(head.cells.length - 2) ?? []) {
    head.append(Object.assign(document.createElement("th"), { scope: "col", className: "n", textContent: title }));
  }
  for (const run of runs) {
    if (!rows.has(run.id)) {
      const row = body.insertRow(), label = document.createElement("label"), swatch = document.createElement("span");
      const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: true });
      box.addEventListener("change", draw);
      swatch.className = "swatch";
      label.append(box, swatch, run.label);
      row.insertCell().append(label);
      cellOf(row, "", true);
      run.latest.forEach(() => cellOf(row, "", true));
      rows.set(run.id, { row, box, swatch, number: rows.size });
    }
    const { row, swatch } = rows.get(run.id);
    swatch.hidden = runs.length === 1;
    row.cells[1].textContent = run.step;
    run.latest.forEach(({ value }, column) => { row.cells[column + 2].textContent = short(value) || "-"; });
  }
}

function listRungs() {
  const said = document.getElementById("curves-rungs");
  const names = (ids) => runs.filter((run) => ids.includes(run.id)).map((run) => run.label).join(", ");
  const items = rungs.map(({ step, on, ended }) => Object.assign(document.createElement("li"), { textContent:
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
  for (const step of rungSteps) {
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

function tableOf(heads) {
  const table = document.createElement("table"), head = table.createTHead().insertRow();
  heads.forEach((text, column) => head.append(Object.assign(document.createElement("th"),
    { scope: "col", textContent: text, className: column > 0 ? "n" : "" })));
  return [table, table.createTBody()];
}

function summaryOf(series) {
  const [table, body] = tableOf(["Series", "Latest", "at step", "First", "Least", "Greatest"]);
  for (const one of series) {
    const row = body.insertRow(), { steps, values } = one;
    cellOf(row, one.label, false);
    for (const text of [short(values.at(-1)), steps.at(-1), short(values[0]), short(Math.min(...values)), short(Math.max(...values))]) {
      cellOf(row, text, true);
    }
  }
  return table;
}

function byStepOf(series, note) {
  const listed = series.slice(0, MAX_LEGEND), [steps, count] = someSteps(listed, ...stepsShown());
  const [table, body] = tableOf(["Step", ...listed.map((one) => one.label)]);
  const columns = listed.map((one) => new Map(one.steps.map((step, place) => [step, one.values[place]])));
  for (const step of steps) {
    const row = body.insertRow();
    row.append(Object.assign(document.createElement("th"), { scope: "row", textContent: step }));
    for (const values of columns) cellOf(row, short(values.get(step)), true);
  }
  note.textContent = (steps.length === count ? `Values of all ${count} steps that are shown`
    : `Values of ${steps.length} of the ${count} steps that are shown; with fewer shown, it has all of them`)
    + (listed.length < series.length ? `; of the first ${listed.length} of ${series.length} series: choose fewer runs for others` : "");
  return table;
}

// Below a chart, and made when opened: tables of 100 runs take longer than drawing them.
function valuesOf(series) {
  const details = document.createElement("details"), summary = document.createElement("summary");
  summary.textContent = "Values";
  details.append(summary);
  const tables = [["Values", summaryOf], ["Values by step", byStepOf]].map(([name, made]) => {
    const scroll = Object.assign(document.createElement("div"), { className: "scroll tall", tabIndex: 0 });
    const note = Object.assign(document.createElement("p"), { className: "quiet" });
    scroll.setAttribute("role", "region");
    details.append(note, scroll);
    return { scroll, note, name, made };
  });
  details.fill = () => {
    if (!details.open) return;
    const title = details.closest("figure").querySelector("figcaption").textContent;
    for (const { scroll, note, name, made } of tables) {
      scroll.setAttribute("aria-label", `${name}: ${title}`);
      scroll.replaceChildren(made(details.series, note));
    }
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
  const style = (one) => ({ label: one.label, stroke: one.colour, dash: one.dash.pattern, ended: one.ended, width, spanGaps: true,
    points: { show: steps.length < 30, size: 5, fill: one.colour }, value: (_, value) => short(value) });
  if (weight === 0) return { options: series.map(style), data: [steps, ...values] };
  const averaged = values.map((one) => smoothed(one, weight));
  if (series.length > MAX_LEGEND) return { options: series.map(style), data: [steps, ...averaged] };
  const faint = series.map((one) => ({ ...style(one), stroke: `${one.colour}50`, width: 1, class: "raw", points: { show: false } }));
  return { options: [...faint, ...series.map(style)], data: [steps, ...values, ...averaged] };
}

// All charts show the same steps, chosen by number or by dragging across one of them.
function showSteps(chosen, by = null) {
  shown = chosen;
  ends.forEach((input, number) => { input.value = shown[number] === null ? "" : Math.round(shown[number]); });
  sayNoSteps("");
  for (const { plot, values } of plots.values()) {
    if (plot !== by) renew(plot, plot.data);
    values.fill();
  }
}

function isWhole() {
  return shown.every((step) => step === null);
}

function stepsShown() {
  return shown.map((step, number) => step ?? whole[number]);
}

function renew(plot, data) {
  plot.setData(data, isWhole());
  zoom(plot);
}

function zoom(plot) {
  const [min, max] = stepsShown();
  if (!isWhole()) plot.setScale("x", { min, max });
}

function followZoom(plot, scale) {
  if (scale !== "x") return;
  const { min, max } = plot.scales.x, steps = plot.data[0], [first, last] = stepsShown();
  const isAll = min <= steps[0] && max >= steps.at(-1);
  if (isAll && isWhole() || min === first && max === last) return;
  showSteps(isAll ? [null, null] : [min, max], plot);
}

function showTyped() {
  const typed = ends.map(({ value }) => value === "" ? null : Number(value));
  const [first, last] = typed.map((step, number) => step ?? whole[number]);
  if (first < last || typed.every((step) => step === null)) showSteps(typed);
  else sayNoSteps(`Nothing is from step ${first} to step ${last}: the chosen runs have steps ${whole[0]} to ${whole[1]}.`);
}

function sayNoSteps(text) {
  document.getElementById("curves-steps-refused").textContent = text;
  for (const input of ends) input.setAttribute("aria-invalid", text !== "");
}

function newPlot(chart, figure, series, made, isLog, said) {
  const style = getComputedStyle(document.body), ink = style.color, rule = style.getPropertyValue("--rule").trim();
  const line = { stroke: rule, width: 1 }, axis = { stroke: ink, grid: line, ticks: line, labelFont: `12px ${style.fontFamily}` };
  const texts = (_, splits) => splits.map(short);
  let pointed = null;  // the number of the series that the pointer is near
  const say = (plot) => {
    const place = pointed ? plot.cursor.idxs[pointed] : null;
    said.textContent = place == null ? said.dataset.key :
      `${plot.series[pointed].label}: ${short(plot.data[pointed][place])} at step ${plot.data[0][place]}`;
  };
  return new uPlot({
    width: Math.max(240, figure.clientWidth - 26), height: 220,
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    axes: [{ ...axis, label: chart.x_label }, { ...axis, label: chart.y_label, labelSize: 20, values: texts, size: 58 }],
    legend: { show: runs.length === 1 && series.length <= MAX_LEGEND },
    focus: { alpha: 0.25 },
    cursor: { focus: { prox: 24 }, dataIdx: (plot, number, place) =>
      number === 0 ? place : made.options[number - 1].class === "raw" ? null : nearest(plot.data[number], place) },
    hooks: { draw: [drawRungs], setScale: [followZoom], setCursor: [say], setSeries: [(plot, number, options) => {
      if (options.focus) pointed = number;
      say(plot);
    }] },
    series: [{ label: "step" }, ...made.options],
  }, made.data, figure);
}

function place(chart, series, isLog, weight) {
  const shape = JSON.stringify([series.map((one) => [one.label, one.colour, one.ended]), isLog, weight > 0, inScheme.matches, innerWidth]);
  const made = drawing(series, isLog, weight), before = plots.get(chart.name);
  if (before?.shape === shape) {
    const { plot, values } = before;
    renew(plot, made.data);
    values.series = series;
    values.fill();
    return;
  }
  const figure = before?.figure ?? document.createElement("figure");
  if (before === undefined) {
    const after = definition.charts.slice(definition.charts.indexOf(chart) + 1).map(({ name }) => plots.get(name)?.figure).find(Boolean);
    document.getElementById("curves-charts").insertBefore(figure, after ?? null);
  }
  const open = before?.values.open ?? false;
  before?.plot.destroy();
  figure.replaceChildren(Object.assign(document.createElement("figcaption"), { textContent: chart.title }));
  const said = Object.assign(document.createElement("p"), { className: "quiet nearest" }), values = valuesOf(series);
  const dashes = new Map(series.map((one) => [one.name, one.dash]));
  said.dataset.key = [...dashes.values()].some(({ pattern }) => pattern.length > 0)
    ? `Lines: ${[...dashes].map(([name, dash]) => `${name} ${dash.name}`).join(", ")}` : "";
  said.textContent = said.dataset.key;
  const plot = newPlot(chart, figure, series, made, isLog, said);
  zoom(plot);
  figure.append(said, Object.assign(document.createElement("p"), { className: "quiet", textContent: chart.caption }), values);
  values.open = open;
  plots.set(chart.name, { figure, plot, values, shape });
}

function draw() {
  const chosen = runs.filter((run) => rows.get(run.id).box.checked), all = document.getElementById("curves-all");
  all.checked = chosen.length === runs.length;
  all.indeterminate = chosen.length > 0 && !all.checked;
  document.getElementById("curves-empty").hidden = chosen.length > 0;
  document.getElementById("curves-empty").textContent = runs.length ? "No run is chosen." : "No metrics yet.";
  const weight = Number(smoothing.value), drawn = chosen.flatMap((run) => run.curves.flat()).filter(({ steps }) => steps.length > 0);
  if (drawn.length > 0) whole = [Math.min(...drawn.map(({ steps }) => steps[0])), Math.max(...drawn.map(({ steps }) => steps.at(-1)))];
  ends.forEach((input, number) => { input.placeholder = whole[number]; });
  rungSteps = new Set(rungs.filter((rung) => chosen.some((run) => [...rung.on, ...rung.ended].includes(run.id))).map((rung) => rung.step));
  for (const { row, swatch, number } of rows.values()) swatch.style.background = colourOf(number);
  for (const [index, chart] of (definition?.charts ?? []).entries()) {
    // The rule for `number` is in the API's description of a curve.
    const styled = (run, number) => runs.length > 1
      ? { colour: colourOf(rows.get(run.id).number), dash: dashOf(number) }
      : { colour: colourOf(number), dash: dashOf(Math.floor(number / definition.colours.light.length)) };
    const series = chosen.flatMap((run) => run.curves[index].map((one) => ({ ...one, ended: run.ended,
      label: runs.length > 1 ? `${run.label} ${one.name}` : one.name, ...styled(run, one.number) })));
    if (series.length === 0) {
      plots.get(chart.name)?.plot.destroy();
      plots.get(chart.name)?.figure.remove();
      plots.delete(chart.name);
    } else {
      // Nothing positive has no place on a logarithmic axis.
      const isLog = log.checked && series.some((one) => one.values.some((value) => value > 0));
      place(chart, series, isLog, weight);
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
      const answer = await fetch(`${path}/curves`, { headers });
      const body = await answer.json();
      if (answer.ok) return { job, found: body };
      refused.push(`${job.name}: ${body.detail}; hint: ${body.hint}`);
      return answers[number];
    }));
  } catch {
    unanswered ??= new Date();
    const isTriedAgain = curves.dataset.follow !== undefined || document.querySelector("[data-stream]") !== null;
    sayFailed(notCurrentWords(unanswered, `the server does not answer; ${isTriedAgain ? "trying again" : "load the page again"}`));
    return;
  } finally {
    restUntil = Date.now() + 4 * (Date.now() - began);  // a large sweep must not keep the server busy
  }
  unanswered = null;
  const read = answers.filter(Boolean);
  definition = read[0]?.found ?? null;
  [runs, rungs] = [runsOf(read), rungsOf(read)];
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
  for (const input of ends) input.addEventListener("change", showTyped);
  document.getElementById("curves-whole").addEventListener("click", () => showSteps([null, null]));
  inScheme.addEventListener("change", draw);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 200); });
  if (curves.dataset.follow === undefined) {
    document.addEventListener("live", refreshSoon);  // console.js follows the job's page
    refreshSoon();
  } else followJobs();
}
