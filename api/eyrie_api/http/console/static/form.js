// The form of a new job: another view of its JSON document. A field writes its value into the document, which console.js
// sends to the server, and takes its error from the answer. Values that no field can show stay as they are.
"use strict";

(() => {
  const form = document.getElementById("new-job"), text = form.elements.text;
  const views = { fields: document.getElementById("fields"), json: document.getElementById("json") };
  let job = {}, isSent = false;

  // Integers beyond 2^53 keep their digits.
  function exact(key, value, context) {
    const isRounded = Number.isInteger(value) && !Number.isSafeInteger(value);
    return isRounded && JSON.rawJSON ? JSON.rawJSON(context.source) : value;
  }

  const isObject = (value) => typeof value === "object" && value !== null;
  const path = (at) => at.split("/").slice(1);
  const step = (here, key) => isObject(here) && Object.hasOwn(here, key) ? here[key] : undefined;
  const get = (at) => path(at).reduce(step, job);
  const above = (at) => at.slice(0, at.lastIndexOf("/"));

  function set(at, value) {
    const keys = path(at), last = keys.pop();
    let here = job;
    for (const key of keys) here = here[key] ??= {};
    here[last] = value;
  }

  // Sections that have no value left go too; items of lists stay.
  function unset(at) {
    const holder = at && get(above(at));
    if (!isObject(holder)) return;
    delete holder[path(at).at(-1)];
    if (Object.keys(holder).length === 0 && above(at) && !Array.isArray(get(above(above(at))))) unset(above(at));
  }

  const isPlain = (item) => !isObject(item) && item !== null && /^[^[\s,]([^\n,]*[^\s,])?$/.test(String(item));

  const isText = (kind) => kind === "text" || kind === "lines";

  function shown(kind, value) {
    if (value === undefined || (value === null && isText(kind))) return "";
    if (kind === "choice") return JSON.stringify(value);
    if (typeof value === "string") return value;
    if (kind === "list" && Array.isArray(value) && value.length && value.every(isPlain)) return value.join(", ");
    return JSON.stringify(value);
  }

  // What is no JSON is sent as text, and the server says what it should be.
  function parsed(given) {
    try {
      return JSON.parse(given, exact);
    } catch {
      return given;
    }
  }

  function typed(input) {
    const given = input.value, { kind, numeric } = input.dataset;
    if (given.trim() === "") return undefined;
    if (isText(kind)) return given;
    if (kind !== "list" || given.trimStart().startsWith("[") || given.trim() === "null") return parsed(given);
    const items = given.split(",").map((item) => item.trim()).filter(Boolean);
    return numeric === undefined ? items : items.map(parsed);
  }

  function write() {
    text.value = JSON.stringify(job, null, 2);
    count();
    text.dispatchEvent(new Event("input"));
  }

  // How many fields of a closed section have a value.
  function count() {
    for (const section of views.fields.querySelectorAll(".section")) {
      const number = [...section.querySelectorAll("[data-at]")].filter((one) => one.value !== "").length;
      section.querySelector(".set").textContent = number ? `${number} set` : "";
    }
  }

  function show() {
    for (const list of views.fields.querySelectorAll("[data-list]")) {
      const items = get(list.dataset.list), place = list.querySelector(".list");
      const number = Array.isArray(items) ? items.length : 0;
      while (place.children.length > number) place.lastElementChild.remove();
      while (place.children.length < number) {
        const one = list.querySelector("template").innerHTML.replaceAll("{i}", place.children.length);
        place.insertAdjacentHTML("beforeend", one);
      }
    }
    for (const input of views.fields.querySelectorAll("[data-at]")) {
      const { at, kind } = input.dataset, value = shown(kind, get(at)), parent = get(above(at));
      if (kind === "choice" && ![...input.options].some((one) => one.value === value)) input.add(new Option(value, value));
      input.value = value;
      // A short form (`engine: sglang`) has no room for fields.
      input.disabled = parent !== undefined && !isObject(parent);
      if (input.disabled) input.title = `The document has ${JSON.stringify(parent)} here: change it as JSON`;
      else input.removeAttribute("title");
    }
    count();
  }

  function view(name) {
    if (name === "fields") {
      const found = parsed(text.value);
      if (!isObject(found) || Array.isArray(found)) name = "json";
      else job = found;
    }
    form.elements.view.value = name;
    for (const [one, part] of Object.entries(views)) part.hidden = one !== name;
    if (name === "fields") show();
    text.dispatchEvent(new Event("input"));
  }

  function clear() {
    for (const place of views.fields.querySelectorAll(".failure")) place.hidden = true;
    for (const input of views.fields.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  }

  // An error is shown at the nearest field or section around its pointer; without one it stays at the top.
  function isPlaced(problem) {
    for (let at = problem.pointer; at; at = above(at)) {
      const place = document.getElementById(`e${at}`), input = document.getElementById(`f${at}`);
      if (place === null) continue;
      const words = at === problem.pointer ? problem.rule : `${problem.pointer}: ${problem.rule}`;
      place.textContent = [place.hidden ? "" : place.textContent, words, problem.hint].filter(Boolean).join("; ");
      place.hidden = false;
      if (input !== null) input.setAttribute("aria-invalid", "true");
      for (let around = place.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
      return true;
    }
    return false;
  }

  form.addEventListener("checked", (event) => {
    clear();
    if (!views.fields.hidden) event.detail.errors = event.detail.errors.filter((one) => !isPlaced(one));
    if (isSent) (views.fields.querySelector("[aria-invalid]") ?? form.elements.view[0]).focus();
    isSent = false;
  });
  form.addEventListener("submit", () => { isSent = true; });
  text.addEventListener("input", () => { isSent = false; });
  for (const radio of form.elements.view) radio.addEventListener("change", () => view(radio.value));
  views.fields.addEventListener("input", (event) => {
    const input = event.target, value = typed(input);
    if (value === undefined) unset(input.dataset.at); else set(input.dataset.at, value);
    write();
  });
  views.fields.addEventListener("click", (event) => {
    const { add, remove } = event.target.dataset, at = add ?? (remove && above(remove));
    if (!at) return;
    const items = Array.isArray(get(at)) ? get(at) : [];
    if (add) items.push({}); else items.splice(Number(path(remove).at(-1)), 1);
    if (items.length) set(at, items); else unset(at);
    show();
    write();
    const list = views.fields.querySelector(`[data-list="${at}"]`);
    (add ? list.querySelector(".list").lastElementChild.querySelector("[data-at]") : list.querySelector("[data-add]")).focus();
  });
  view("fields");
})();
