// Curves of the training: of one drafter, of the runs of a sweep, or of several jobs. `GET .../curves` says which charts
// there are, with their words and values. Each is a Vega view, which gets new rows when values arrive or others are chosen.
"use strict";

// Of one chart: drawing takes a few microseconds a point, and a chart has fewer columns of pixels than points.
const MAX_POINTS = 12000, MAX_LEGEND = 12, MAX_ROWS = 50, REFRESH_MS = 5000, CHART_HEIGHT = 220, NEAR_PX = 24;

// Pure functions.

// At most so many points: of each of equal parts the value furthest from the one before, so that spikes stay.
function thinned(steps, values, most) {
  if (steps.length <= most) return [steps, values];
  const kept = [0];
  for (let part = 1; part < most; part++) {
    const [first, end] = [0, 1].map((more) => Math.floor((part + more) * steps.length / most));
    let best = first;
    for (let place = first; place < end; place++) {
      if (Math.abs(values[place] - values[kept.at(-1)]) > Math.abs(values[best] - values[kept.at(-1)])) best = place;
    }
    kept.push(best);
  }
  return [kept.map((place) => steps[place]), kept.map((place) => values[place])];
}

// Exponential moving average, corrected for its start: the first value is the first average.
function smoothed(values, weight) {
  let sum = 0, share = 0;
  return values.map((value) => {
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

// The place of the step that is nearest, in ascending steps of which there are some.
function nearest(steps, wanted) {
  const after = steps.findIndex((step) => step >= wanted);
  if (after <= 0) return after === 0 ? 0 : steps.length - 1;
  return steps[after] - wanted < wanted - steps[after - 1] ? after : after - 1;
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
  const colours = theme().range.category;
  return colours[number % colours.length];
}

function theme() {
  return definition.themes[inScheme.matches ? "dark" : "light"];
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

// The rows of the lines from the first to the last step, with their neighbours outside. With smoothing each series has two
// lines, the raw one faint; of many the raw ones are left out, since they would hide the smoothed ones.
function rowsOf(series, isLog, weight, first, last) {
  const withRaw = weight > 0 && series.length <= MAX_LEGEND, rows = [];
  const most = Math.max(50, Math.floor(MAX_POINTS / series.length / (withRaw ? 2 : 1)));
  const add = (label, kind, steps, all) => {
    const begin = steps.findIndex((step) => step >= first), after = steps.findIndex((step) => step > last);
    if (begin < 0 || after === 0) return;
    const from = Math.max(0, begin - 1), until = after < 0 ? steps.length : after + 1;
    const shownSteps = [], values = [];
    for (let place = from; place < until; place++) {
      if (isLog && all[place] <= 0) continue;  // nothing positive has no place on a logarithmic axis
      shownSteps.push(steps[place]);
      values.push(all[place]);
    }
    const [thinSteps, thinValues] = thinned(shownSteps, values, most);
    thinSteps.forEach((step, place) => rows.push({ series: label, kind, step, value: thinValues[place] }));
  };
  for (const { label, steps, values } of series) {
    if (withRaw) add(label, "raw", steps, values);
    add(label, "drawn", steps, weight > 0 ? smoothed(values, weight) : values);
  }
  return rows;
}

// A chart as a Vega-Lite specification. Its rows come later, each kind by the name of its data.
function specOf(chart, series, isLog, width) {
  const labels = series.map(({ label }) => label);
  const x = { field: "step", type: "quantitative", title: chart.x_label,
    scale: { zero: false, nice: false, domainMin: { expr: "first" }, domainMax: { expr: "last" } } };
  const y = { field: "value", type: "quantitative", title: chart.y_label, scale: { zero: false, type: isLog ? "log" : "linear" } };
  const legend = runs.length === 1 && series.length > 1 && series.length <= MAX_LEGEND 
    ? { symbolType: "stroke", symbolSize: 400, columns: width < 360 ? 1 : 2 } : null;
  const styled = (range) => ({ field: "series", type: "nominal", title: null, sort: null, legend, scale: { domain: labels, range } });
  const color = styled(series.map(({ colour }) => colour));
  const strokeDash = styled(series.map(({ dash }) => dash.pattern.length ? dash.pattern : [1, 0]));
  const opacity = { field: "kind", type: "nominal", legend: null, scale: { domain: ["raw", "drawn"], range: [0.3, 1] } };
  const strokeWidth = series.length > MAX_LEGEND ? 1 : 1.5;
  return { width, height: CHART_HEIGHT, padding: { left: 0, top: 0, right: 0, bottom: 6 }, autosize: { type: "fit-x", contains: "padding" },
    config: { ...theme(), mark: { invalid: null } }, params: [{ name: "first", value: 0 }, { name: "last", value: 1 }],
    layer: [
      { data: { name: "points" }, mark: { type: "line", strokeWidth, clip: true }, encoding: { x, y, color, strokeDash, opacity } },
      { data: { name: "pointed" }, mark: { type: "line", strokeWidth: 3.5, clip: true }, encoding: { x, y, color, strokeDash } },
      { data: { name: "nearest" }, mark: { type: "point", filled: true, size: 60, opacity: 1, clip: true }, encoding: { x, y, color } },
      { data: { name: "rungs" }, mark: { type: "rule", strokeDash: [4, 4], strokeWidth: 1.5, style: "ink" }, encoding: { x } },
      { data: { name: "ends" }, mark: { type: "point", shape: "M-1,-1L1,1M-1,1L1,-1", size: 60, strokeWidth: 2, opacity: 1, style: "ink" },
        encoding: { x, y } },
    ] };
}

// All charts show the same steps, chosen by number or by dragging across one of them.
function showSteps(chosen) {
  shown = chosen;
  ends.forEach((input, number) => { input.value = shown[number] === null ? "" : Math.round(shown[number]); });
  sayNoSteps("");
  for (const plot of plots.values()) fill(plot);
}

function stepsShown() {
  return shown.map((step, number) => step ?? whole[number]);
}

// New rows for a view, and for the open tables below it.
function fill(plot) {
  const { view, series, isLog, weight, values } = plot;
  const own = [Math.min(...series.map(({ steps }) => steps[0])), Math.max(...series.map(({ steps }) => steps.at(-1)))];
  const [first, last] = shown.map((step, number) => step ?? own[number]);
  plot.rows = rowsOf(series, isLog, weight, first, last);
  plot.lines = new Map(series.map(({ label }) => [label, []]));
  for (const row of plot.rows) if (row.kind === "drawn") plot.lines.get(row.series).push(row);
  view.signal("first", first).signal("last", last > first ? last : first + 1).data("points", plot.rows)
    .data("rungs", [...rungSteps].filter((step) => first <= step && step <= last).map((step) => ({ step })))
    .data("ends", series.filter(({ label, ended }) => ended && plot.lines.get(label).length)
      .map(({ label }) => bare(plot.lines.get(label).at(-1))).filter(({ step }) => step <= last));
  point(plot, null);
  values.fill();
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

// A row for other data of a view: Vega marks those that it has got.
function bare({ series, step, value }) {
  return { series, step, value };
}

// The line that the pointer is near, with its value in words.
function point(plot, row) {
  const { view, said, lines } = plot;
  said.textContent = row === null ? said.dataset.key : `${row.series}: ${short(row.value)} at step ${row.step}`;
  if (plot.pointed !== row?.series) view.data("pointed", row === null ? [] : lines.get(row.series).map(bare));
  plot.pointed = row?.series;
  view.data("nearest", row === null ? [] : [bare(row)]).run();
}

// Where an event is: pixels from the upper left corner of the axes.
function placeOf(plot, event) {
  const box = plot.view.container().querySelector("canvas").getBoundingClientRect(), [left, top] = plot.view.origin();
  const within = (value, most) => Math.max(0, Math.min(most, value));
  return [within(event.clientX - box.left - left, plot.view.width()), within(event.clientY - box.top - top, plot.view.height())];
}

function followPointer(plot, drawing) {
  const band = Object.assign(document.createElement("div"), { className: "band", hidden: true });
  let began = null;
  drawing.append(band);
  const stepAt = (across) => plot.view.scale("x").invert(across);
  drawing.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    [began] = placeOf(plot, event);
    drawing.setPointerCapture(event.pointerId);
  });
  drawing.addEventListener("pointermove", (event) => {
    const [across, down] = placeOf(plot, event), scale = plot.view.scale("y");
    if (began !== null) {
      const [left] = plot.view.origin();
      band.hidden = Math.abs(across - began) < 4;
      Object.assign(band.style, { left: `${left + Math.min(began, across)}px`, width: `${Math.abs(across - began)}px` });
      return;
    }
    let best = null, least = NEAR_PX;
    for (const rows of plot.lines.values()) {
      if (!rows.length) continue;
      const row = rows[nearest(rows.map(({ step }) => step), stepAt(across))], away = Math.abs(scale(row.value) - down);
      if (away < least) [best, least] = [row, away];
    }
    if (best !== null || plot.pointed !== undefined) point(plot, best);
  });
  drawing.addEventListener("pointerup", (event) => {
    if (began === null) return;
    const [across] = placeOf(plot, event), steps = [began, across].map(stepAt).sort((a, b) => a - b);
    if (!band.hidden) showSteps(steps);
    began = null;
    band.hidden = true;
  });
  drawing.addEventListener("pointerleave", () => { if (plot.pointed !== undefined) point(plot, null); });
  drawing.addEventListener("dblclick", () => showSteps([null, null]));
}

function place(chart, series, isLog, weight) {
  const shape = JSON.stringify([series.map((one) => [one.label, one.colour]), isLog, inScheme.matches, innerWidth]);
  const before = plots.get(chart.name);
  if (before?.shape === shape) {
    Object.assign(before, { series, weight });
    before.values.series = series;
    fill(before);
    return;
  }
  const figure = before?.figure ?? document.createElement("figure");
  if (before === undefined) {
    const after = definition.charts.slice(definition.charts.indexOf(chart) + 1).map(({ name }) => plots.get(name)?.figure).find(Boolean);
    document.getElementById("curves-charts").insertBefore(figure, after ?? null);
  }
  const open = before?.values.open ?? false;
  before?.view.finalize();
  const drawing = Object.assign(document.createElement("div"), { className: "drawing" });
  const said = Object.assign(document.createElement("p"), { className: "quiet nearest" }), values = valuesOf(series);
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", `${chart.title}. ${chart.caption}`);
  figure.replaceChildren(Object.assign(document.createElement("figcaption"), { textContent: chart.title }), drawing, said,
    Object.assign(document.createElement("p"), { className: "quiet", textContent: chart.caption }), values);
  const dashes = new Map(series.map((one) => [one.name, one.dash]));
  said.dataset.key = [...dashes.values()].some(({ pattern }) => pattern.length > 0)
    ? `Lines: ${[...dashes].map(([name, dash]) => `${name} ${dash.name}`).join(", ")}` : "";
  values.open = open;
  const spec = specOf(chart, series, isLog, Math.max(240, drawing.clientWidth));
  const plot = { figure, view: viewOf(spec, drawing, "canvas"), said, values, shape, series, isLog, weight, spec };
  plots.set(chart.name, plot);
  followPointer(plot, drawing);
  fill(plot);
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
      : { colour: colourOf(number), dash: dashOf(Math.floor(number / theme().range.category.length)) };
    const series = chosen.flatMap((run) => run.curves[index].map((one) => ({ ...one, ended: run.ended,
      label: runs.length > 1 ? `${run.label} ${one.name}` : one.name, ...styled(run, one.number) })));
    if (series.length === 0) {
      plots.get(chart.name)?.view.finalize();
      plots.get(chart.name)?.figure.remove();
      plots.delete(chart.name);
    } else {
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
    await loaded();
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
