// Changes of the administration: a form sends one request to the REST API and shows its refusal; a secret is shown once.
"use strict";
(() => {
  // What the server should refuse is sent as it was typed.
  function typed(input) {
    const given = input.value.trim(), { kind, empty } = input.dataset;
    if (given === "") return empty === "null" ? null : undefined;
    if (kind === "number") return Number.isFinite(Number(given)) ? Number(given) : given;
    if (kind === "list") return given === "[]" ? [] : given.split(",").map((one) => one.trim()).filter(Boolean);
    return given;
  }

  function request(form) {
    const body = JSON.parse(form.dataset.body ?? "{}");
    let path = form.dataset.path;
    for (const input of form.querySelectorAll("input[data-kind], select")) {
      const value = typed(input);
      if (input.name === "project" && value === "*") body.everywhere = true;
      else if (input.name === "project") path += `?project=${encodeURIComponent(value)}`;
      else if (value !== undefined) body[input.name] = value;
    }
    for (const several of form.querySelectorAll("[data-several]")) {
      body[several.dataset.several] = [...several.querySelectorAll(":checked")].map((one) => one.value);
    }
    return [form.dataset.method, path, JSON.stringify(body)];
  }

  function say(form, words) {
    form.querySelector(".refused").textContent = words;
  }

  function clear(form) {
    say(form, "");
    for (const input of form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
    for (const place of form.querySelectorAll("[id$='-error']")) place.hidden = true;
  }

  function refused(form, problem) {
    const errors = problem.errors ?? [];
    let placed = 0;
    for (const { pointer, rule } of errors) {
      const input = form.elements[pointer.split("/")[1]], place = input && document.getElementById(`${input.id}-error`);
      if (!place) continue;
      input.setAttribute("aria-invalid", "true");
      Object.assign(place, { textContent: rule, hidden: false });
      placed += 1;
    }
    const isPlaced = errors.length > 0 && placed === errors.length;
    say(form, isPlaced ? "Refused: correct the marked fields." : [problem.detail, problem.hint].filter(Boolean).join("; hint: "));
    (form.querySelector("[aria-invalid]") ?? form.querySelector("button")).focus();
  }

  function button(label, act) {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: label });
    made.addEventListener("click", act);
    return made;
  }

  // Browsers have a clipboard for pages on loopback or behind https; elsewhere the secret is selected to be copied.
  async function copy(text, said) {
    try {
      await navigator.clipboard.writeText(text.textContent);
      said.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(text);
      said.textContent = "Selected: copy it with Ctrl+C or from the menu.";
    }
  }

  // The secret stands in the document until the page is loaded again, and nowhere else.
  function show(place, secret, what) {
    const words = document.createElement("p"), text = document.createElement("code"), line = document.createElement("div");
    const said = Object.assign(document.createElement("p"), { className: "quiet" });
    words.textContent = `${what} It is shown this once: copy it to where it is used.`;
    Object.assign(text, { textContent: secret, tabIndex: 0 });
    said.setAttribute("role", "status");
    line.append(button("Copy", () => copy(text, said)), button("Done", () => location.reload()), said);
    place.className = "secret";
    place.replaceChildren(words, text, line);
    place.focus();
  }

  async function change(form) {
    if (form.dataset.question && !confirm(form.dataset.question)) return;
    const pressed = form.querySelector("button");
    clear(form);
    pressed.disabled = true;
    try {
      const answer = await send(...request(form));
      const given = answer.status === 204 ? {} : await answer.json();
      pressed.disabled = false;
      if (!answer.ok) return refused(form, given);
      if (!given.secret) return location.reload();
      form.reset();
      const place = document.getElementById(form.dataset.made);
      show(place, given.secret, given.key ? `The key ${given.key.name} (${given.key.id}).` : `The secret of ${given.webhook.id}.`);
    } catch {
      pressed.disabled = false;
      say(form, "The server does not answer.");
    }
  }

  document.addEventListener("submit", (event) => {
    if (event.target.dataset.path === undefined) return;
    event.preventDefault();
    change(event.target);
  });
})();
