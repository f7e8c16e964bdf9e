// Offers a chat with the model: streamed, with parameters, log probabilities of tokens, and the
// timeline of each answer.

import { ServiceError, chat } from "./api.js";
import { byId, h } from "./dom.js";
import * as explain from "./explain.js";
import { plural, rate, seconds } from "./format.js";
import { stageBar, stageTable, updateBar } from "./stages.js";
import { refresh } from "./store.js";
import { TokenView } from "./tokens.js";

const PARAMETERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1, value: 0.7 }],
  ["top_p", "Top-p", { min: 0.05, max: 1, step: 0.05, value: 1 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1, value: 256 }],
  // JavaScript rounds greater numbers.
  ["seed", "Seed", { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, placeholder: "random" }],
  [
    "top_logprobs",
    "Log probabilities",
    {
      min: 0,
      max: 20,
      step: 1,
      value: 5,
      title: "Number of alternatives for each token; empty: none",
    },
  ],
];

const turns = []; // {role, content}
let log;
let form;
let input;
let send;
let system;
let controller = null; // of the answer that streams
let waiting = []; // answers without a timeline yet

export function create() {
  log = h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: 0 });
  input = h("textarea", {
    id: "message",
    rows: 3,
    placeholder: "Ask the model",
    "aria-label": "Message",
  });
  send = h("button", { type: "submit", class: "primary", text: "Send" });
  system = h("textarea", { id: "system", rows: 3, placeholder: "none" });
  const fields = PARAMETERS.map(([name, label, attributes]) =>
    h(
      "div",
      { class: "field" },
      h("label", { for: `parameter-${name}`, text: label }),
      h("input", {
        id: `parameter-${name}`,
        name,
        type: "number",
        inputmode: "decimal",
        ...attributes,
      }),
    ),
  );
  form = h(
    "form",
    { class: "chat panel", novalidate: true },
    log,
    h(
      "div",
      { class: "compose" },
      input,
      h(
        "div",
        { class: "actions" },
        h("small", {
          class: "muted",
          text: "Enter sends, Shift+Enter breaks the line, Escape stops",
        }),
        h("button", { type: "button", class: "quiet", text: "Clear", onclick: clear }),
        send,
      ),
    ),
  );
  const settings = h(
    "details",
    { class: "panel settings" },
    h("summary", { text: "Parameters" }),
    h(
      "div",
      { class: "fields" },
      fields,
      h(
        "div",
        { class: "field wide" },
        h("label", { for: "system", text: "System message" }),
        system,
      ),
    ),
  );
  settings.open = matchMedia("(min-width: 900px)").matches;
  const panels = { chat: form, explain: explain.create(parameters) };
  byId("playground").append(modeTabs(panels), ...Object.values(panels), settings);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (controller) controller.abort();
    else ask();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!controller) ask();
    }
  });
  byId("playground").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && controller) controller.abort();
  });
  showEmpty();
}

// Returns the tabs of the playground, which show one of the panels.
function modeTabs(panels) {
  const tabs = Object.keys(panels).map((name) =>
    h("button", {
      type: "button",
      role: "tab",
      id: `mode-${name}`,
      "aria-controls": `panel-${name}`,
      text: name[0].toUpperCase() + name.slice(1),
      onclick: () => show(name),
    }),
  );
  function show(shown) {
    for (const [index, [name, panel]] of Object.entries(panels).entries()) {
      panel.id = `panel-${name}`;
      panel.setAttribute("role", "tabpanel");
      panel.setAttribute("aria-labelledby", `mode-${name}`);
      panel.hidden = name !== shown;
      tabs[index].setAttribute("aria-selected", String(name === shown));
      tabs[index].tabIndex = name === shown ? 0 : -1;
    }
  }
  const list = h("div", { class: "modes", role: "tablist", "aria-label": "Playground" }, tabs);
  list.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    const next = tabs[1 - tabs.indexOf(document.activeElement)];
    next.focus();
    next.click();
  });
  show("chat");
  return list;
}

function showEmpty() {
  log.replaceChildren(h("p", { class: "empty", text: "No questions yet." }));
}

function clear() {
  if (controller) controller.abort();
  setController(null); // so ask() drops the answer
  turns.length = 0;
  waiting = [];
  showEmpty();
  input.focus();
}

function setController(chosen) {
  controller = chosen;
  send.textContent = chosen ? "Stop" : "Send";
}

// Returns the parameters of the request. Raises ServiceError for a value that is not a number in
// its range.
function parameters() {
  const found = {};
  for (const [name, label] of PARAMETERS) {
    const field = byId(`parameter-${name}`);
    field.removeAttribute("aria-invalid");
    if (!field.checkValidity()) {
      field.setAttribute("aria-invalid", "true");
      field.closest("details").open = true;
      field.focus();
      throw new ServiceError(0, `${label}: ${field.validationMessage}`);
    }
    if (field.value !== "") found[name] = Number(field.value);
  }
  return "top_logprobs" in found ? { ...found, logprobs: true } : found;
}

function addTurn(role, ...children) {
  if (!turns.length) log.replaceChildren();
  const node = h(
    "article",
    { class: `turn ${role}` },
    h("h3", { text: role === "user" ? "You" : "Model" }),
    ...children,
  );
  log.append(node);
  node.scrollIntoView({ block: "nearest" });
  return node;
}

async function ask() {
  const content = input.value.trim();
  if (!content) return input.focus();
  let chosen;
  try {
    chosen = parameters();
  } catch (error) {
    return showProblem(error.message);
  }
  showProblem("");
  addTurn("user", h("p", { class: "said", text: content }));
  turns.push({ role: "user", content });
  input.value = "";
  const answer = startAnswer(chosen.logprobs);
  const messages = [
    ...(system.value.trim() ? [{ role: "system", content: system.value.trim() }] : []),
    ...turns,
  ];
  const own = new AbortController();
  setController(own);
  let error = null;
  try {
    await chat({ ...chosen, messages }, answer.id, own.signal, (chunk) => takeChunk(answer, chunk));
  } catch (raised) {
    error = raised;
  }
  if (controller !== own) return; // the conversation was cleared
  setController(null);
  if (!error) endAnswer(answer, answer.finish);
  else if (error.name === "AbortError") endAnswer(answer, "stopped");
  else endAnswer(answer, "failed", error.message);
  if (error?.status === 401) refresh();
}

function showProblem(text) {
  let node = form.querySelector(".compose .problem");
  if (!node)
    form.querySelector(".compose").prepend((node = h("p", { class: "problem", role: "alert" })));
  node.textContent = text;
}

function startAnswer(hasLogprobs) {
  const id = `console-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  const answer = {
    id,
    text: "",
    finish: "",
    began: performance.now(),
    first: 0,
    tokens: 0,
    view: hasLogprobs ? new TokenView() : null,
    thought: null, // shows the reasoning if there is no view
  };
  answer.said = answer.view ? answer.view.text : h("p", { class: "said" });
  answer.note = h("p", {
    class: "note muted",
    role: "status",
    text: "Waiting for the first token…",
  });
  answer.node = addTurn(
    "assistant",
    answer.said,
    answer.view ? answer.view.inspector : null,
    answer.note,
  );
  answer.node.setAttribute("aria-busy", "true");
  return answer;
}

function takeChunk(answer, chunk) {
  if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
  const [choice] = chunk.choices;
  if (!choice) return;
  const text = choice.delta.content || "";
  const thought = choice.delta.reasoning_content || choice.delta.reasoning || "";
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  if (text || thought || choice.logprobs?.content?.length) answer.first ||= performance.now();
  answer.text += text;
  answer.finish = choice.finish_reason || answer.finish;
  if (answer.view)
    for (const entry of choice.logprobs?.content || [])
      answer.view.add(entry, !(choice.finish_reason === "stop" && !text));
  else {
    if (thought && !answer.thought)
      answer.said.append((answer.thought = h("div", { class: "muted" })));
    answer.thought?.append(thought);
    answer.said.append(text);
  }
  if (answer.first)
    answer.note.textContent = `First token after ${seconds((answer.first - answer.began) / 1000)}, measured in this browser`;
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function endAnswer(answer, finish, problem = "") {
  const end = performance.now();
  answer.node.removeAttribute("aria-busy");
  if (answer.text) turns.push({ role: "assistant", content: answer.text });
  else turns.pop(); // removes the question, which has no answer
  if (problem) {
    answer.note.className = "problem";
    answer.note.textContent = problem;
    return;
  }
  const spoken =
    answer.tokens > 1 && answer.first
      ? `, ${rate((1000 * (answer.tokens - 1)) / (end - answer.first))} tokens/s`
      : "";
  const parts = [
    finish.replaceAll("_", " "),
    answer.tokens ? plural(answer.tokens, "token") + spoken : "",
    answer.first
      ? `first after ${seconds((answer.first - answer.began) / 1000)} measured in this browser`
      : "",
  ];
  answer.note.textContent = parts.filter(Boolean).join(" · ");
  waiting.push(answer);
  refresh();
}

// Adds the timelines, which come with the router's list of ended requests.
export function update(state) {
  for (const answer of [...waiting]) {
    const found = state.ended.find((request) => request.id === answer.id);
    if (!found) continue;
    waiting.splice(waiting.indexOf(answer), 1);
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    const bar = stageBar();
    updateBar(bar, found, found.total || 1);
    const summary = h(
      "summary",
      {},
      h("span", { text: "Timeline" }),
      bar,
      h("span", { class: "total", text: seconds(found.total) }),
    );
    answer.node.append(h("details", { class: "timeline" }, summary, stageTable(found)));
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
}
