// Compared answers: the events of POST .../compare as coloured rounds, figures, a table and the tree of a chosen round.
"use strict";

(() => {
  const form = document.getElementById("compare");
  if (form === null) return;
  const said = document.getElementById("said"), tree = document.getElementById("tree");
  const names = { drafted: "with the drafter", undrafted: "without the drafter" };
  let rounds = { drafted: [], undrafted: [] }, recorded = null, missing = false;

  const column = (run) => document.querySelector(`[data-run=${run}]`);
  const shown = (text) => text.replaceAll(" ", "\u00b7").replaceAll("\n", "\u21b5") || "(empty)";
  const listed = (tokens) => tokens.map((one) => shown(one.token)).join(", ") || "none";
  const rejected = (round) => round.nodes.slice(1).filter((node) => !node.accepted);

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function words(round, number) {
    if (number === 0) return "The prompt: the target's first token, before any draft.";
    if (round.tokens.length === 0) return `Chunk ${number}: ${round.num_tokens} tokens at once.`;
    const drafts = round.tokens.filter((one) => one.drafted), own = round.tokens.filter((one) => !one.drafted);
    return `Round ${number}: accepted ${listed(drafts)}; the target's own ${listed(own)}; rejected ${listed(rejected(round))}.`;
  }

  function add(run, round) {
    const number = rounds[run].push(round) - 1, part = element("span", "round");
    const tokens = round.tokens.length ? round.tokens : [{ token: round.text, several: round.num_tokens > 1 }];
    for (const one of tokens)
      part.append(element("span", `token${one.drafted ? " drafted" : ""}${one.several ? " several" : ""}`, one.token));
    part.setAttribute("role", "button");
    part.setAttribute("aria-pressed", "false");
    part.tabIndex = number === 0 ? 0 : -1;
    part.dataset.number = number;
    if (!round.text.trim()) part.setAttribute("aria-label", words(round, number));  // a button needs a name
    column(run).querySelector(".answer").append(part);
    const row = element("tr"), drafts = round.tokens.filter((one) => one.drafted);
    row.append(element("td", "n", number));
    const cells = round.tokens.length
      ? [listed(drafts), listed(round.tokens.filter((one) => !one.drafted)), listed(rejected(round))]
      : ["not reported", shown(round.text), "not reported"];
    for (const text of cells) row.append(element("td", "message", text));
    column(run).querySelector("tbody").append(row);
  }

  function branch(round, parent) {
    const list = element("ul");
    round.nodes.forEach((node, place) => {
      if (place === 0 || node.parent !== parent) return;
      const item = element("li"), text = element("code", node.accepted ? "token drafted" : "rejected", shown(node.token));
      item.append(text, node.accepted ? " accepted" : " rejected");
      const below = branch(round, place);
      if (below.children.length) item.append(below);
      list.append(item);
    });
    return list;
  }

  function choose(run, number) {
    const round = rounds[run][number];
    document.querySelectorAll(".round").forEach((one) => one.setAttribute("aria-pressed", "false"));
    column(run).querySelectorAll(".round")[number].setAttribute("aria-pressed", "true");
    const title = element("p", "", `${words(round, number)} Answer ${names[run]}.`);
    if (round.nodes.length < 2) {
      tree.replaceChildren(title, element("p", "empty", round.tokens.length || number === 0
        ? "Nothing was drafted in this round." : "The engine does not report its draft trees."));
      return;
    }
    const root = element("ul"), item = element("li");
    item.append(element("code", "", shown(round.nodes[0].token)), " the last token before the round", branch(round, 0));
    root.append(item);
    tree.replaceChildren(title, root);
  }

  function point(part) {
    const run = part.closest(".run").dataset.run, number = Number(part.dataset.number);
    column(run).querySelector(".round-said").textContent = words(rounds[run][number], number);
  }

  for (const run of Object.keys(names)) {
    const answer = column(run).querySelector(".answer"), of = (event) => event.target.closest(".round");
    answer.addEventListener("mouseover", (event) => of(event) && point(of(event)));
    answer.addEventListener("focusin", (event) => of(event) && point(of(event)));
    answer.addEventListener("click", (event) => of(event) && choose(run, Number(of(event).dataset.number)));
    answer.addEventListener("keydown", (event) => {
      const part = of(event);
      if (part === null) return;
      if (event.key === "Enter" || event.key === " ") choose(run, Number(part.dataset.number));
      const next = { ArrowRight: part.nextElementSibling, ArrowLeft: part.previousElementSibling,
        Home: answer.firstElementChild, End: answer.lastElementChild }[event.key];
      if (next) {
        part.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
      } else if (!["Enter", " "].includes(event.key)) return;
      event.preventDefault();
    });
  }

  const handle = {
    progress(event) {
      for (const round of event.rounds) add(event.run, round);
      for (const place of column(event.run).querySelectorAll("[data-figure]")) {
        const value = event[place.dataset.figure], digits = { tokens_per_s: 1, tau: 2 }[place.dataset.figure] ?? 0;
        place.textContent = value === null ? "-" : value.toFixed(digits);
      }
      said.textContent = `Answering ${names[event.run]}.`;
    },
    recorded(event) {
      recorded = event;
      const place = column(event.run), figure = (name) => place.querySelector(`[data-figure=${name}]`);
      place.querySelector(".answer").append(element("span", "token", event.text));
      place.querySelector("details").hidden = true;
      place.querySelector(".round-said").textContent = "A recorded answer has no rounds.";
      figure("num_tokens").textContent = event.num_tokens;
      if (event.tokens_per_s !== null) figure("tokens_per_s").textContent = event.tokens_per_s.toFixed(1);
      const note = place.querySelector(".recorded");
      note.textContent = `Not answered now: recorded by the proof of job ${event.job_id}`
        + `${event.is_cut ? `, which ends answers at ${event.num_tokens} tokens` : ""}.`
        + (event.tokens_per_s === null ? " Its speed was not measured."
          : " The speed is the mean of that proof's load test for one user without a drafter.");
      note.hidden = false;
    },
    unavailable(event) {
      missing = true;
      handle.failed(event);
    },
    failed(event) {
      const note = column(event.run).querySelector(".failure");
      note.textContent = `${event.message}; hint: ${event.hint}`;
      note.hidden = false;
    },
    end(event) {
      const traced = rounds.drafted.some((round) => round.tokens.length);
      said.textContent = { true: traced ? "Both answers are equal, token for token."
        : `Both answers have the same text${recorded ? ", up to the shorter one where that was cut off" : ""}.`,
      false: "The answers differ.",
      null: missing ? "There is no answer without the drafter to compare with."
        : "Only complete answers can be compared." }[event.equal];
      const depth = (round) => round.nodes.filter((node) => node.accepted).length;
      const best = rounds.drafted.reduce((most, round, at) => depth(round) > depth(rounds.drafted[most]) ? at : most, 0);
      if (rounds.drafted.length && document.querySelector(".round[aria-pressed=true]") === null) choose("drafted", best);
    },
  };

  async function run() {
    const body = JSON.stringify({ prompt: form.elements.prompt.value, max_tokens: Number(form.elements.max_tokens.value) });
    const answer = await send("POST", form.dataset.path, body);
    if (!answer.ok) {
      const problem = await answer.json();
      said.textContent = `${problem.detail}; hint: ${problem.hint}`;
      return;
    }
    let rest = "", ended = false;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const messages = (rest + value).split("\n\n");
      rest = messages.pop();
      for (const message of messages) {
        const [, name, data] = message.match(/^event: (\w+)\ndata: (.*)$/s);
        handle[name](JSON.parse(data));
        ended = ended || name === "end";
      }
    }
    if (!ended) said.textContent = "The server ended the comparison early. Run it again; your access may have ended.";
  }

  const list = document.getElementById("recorded"), prompt = form.elements.prompt;
  if (list !== null) {
    list.addEventListener("change", () => { if (list.value) prompt.value = list.value; });
    prompt.addEventListener("input", () => {
      list.value = prompt.value;
      if (list.selectedIndex < 0) list.selectedIndex = 0;  // none of them
    });
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    rounds = { drafted: [], undrafted: [] };
    recorded = null;
    missing = false;
    document.querySelectorAll(".run").forEach((one) => {
      one.querySelector(".answer").replaceChildren();
      one.querySelector("tbody").replaceChildren();
      one.querySelector(".failure").hidden = true;
      one.querySelector(".recorded").hidden = true;
      one.querySelector("details").hidden = false;
      one.querySelector(".round-said").textContent = "No round is pointed at.";
      one.querySelectorAll("[data-figure]").forEach((place) => { place.textContent = "-"; });
    });
    tree.replaceChildren(element("p", "empty", "Choose a round of an answer above."));
    said.textContent = "Waiting for the first token.";
    try {
      await run();
    } catch {
      said.textContent = "The server does not answer. Run it again in a moment.";
    }
    button.disabled = false;
  });
})();
