// Explains one prompt, as `tandem explain` does: tokens, shapes, work, KV cache, and for each
// generated token its candidates and its time. The work comes from the router, everything else from
// the answers of the API.

import { ServiceError, arithmetic, complete, post } from "./api.js";
import { h } from "./dom.js";
import { bytes, count, plural, rate, seconds } from "./format.js";
import { percent, visible } from "./tokens.js";

const MAX_TOKENS = 64;
const DEFAULT_CANDIDATES = 5;

let readParameters;
let prompt;
let result;
let send;
let controller = null;

// `parameters`: returns the parameters of the playground.
export function create(parameters) {
  readParameters = parameters;
  prompt = h("textarea", {
    id: "explain-prompt",
    rows: 3,
    placeholder: "The cat sat on the mat because",
    "aria-label": "Prompt",
  });
  send = h("button", { type: "submit", class: "primary", text: "Explain" });
  result = h("div", { class: "explained", "aria-live": "polite" });
  const form = h(
    "form",
    { class: "compose", novalidate: true },
    prompt,
    h(
      "div",
      { class: "actions" },
      h("small", { class: "muted", text: `Continues the text with at most ${MAX_TOKENS} tokens` }),
      send,
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (controller) controller.abort();
    else explain();
  });
  return h("div", { class: "panel explain", hidden: true }, form, result);
}

async function explain() {
  controller = new AbortController();
  send.textContent = "Stop";
  result.replaceChildren(h("p", { class: "note muted", text: "Working…" }));
  try {
    const found = await run(prompt.value || prompt.placeholder, controller.signal);
    result.replaceChildren(...sections(found));
  } catch (error) {
    const text = error.name === "AbortError" ? "stopped" : error.message;
    result.replaceChildren(h("p", { class: "problem", role: "alert", text }));
  }
  controller = null;
  send.textContent = "Explain";
}

// Two completions with one seed draw the same tokens: one reports the model's own probabilities,
// the other those after temperature and filters.
async function run(text, signal) {
  const { top_logprobs: top, max_tokens: most = 16, logprobs: _, ...sampling } = readParameters();
  const body = {
    seed: crypto.getRandomValues(new Uint32Array(1))[0],
    ...sampling,
    prompt: text,
    max_tokens: Math.min(most, MAX_TOKENS),
    logprobs: top ?? DEFAULT_CANDIDATES,
  };
  const tokens = await post("tokenize", { prompt: text, return_token_strs: true }, signal);
  const steps = [];
  const found = { tokens, steps, text: "", finish: "", usage: null };
  const began = performance.now();
  let last = began;
  await complete(body, `explain-${body.seed}-${Math.round(began)}`, signal, (chunk) => {
    if (chunk.usage) found.usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    const now = performance.now();
    const own = choice.logprobs || { tokens: [] };
    own.tokens.forEach((token, index) => {
      const wait = index ? 0 : (now - last) / 1000; // tokens of one message come together
      steps.push({
        token,
        logprob: own.token_logprobs[index],
        top: own.top_logprobs?.[index] || {},
        seconds: wait,
      });
    });
    if (own.tokens.length) last = now;
    found.text += choice.text;
    found.finish = choice.stop_reason ?? choice.finish_reason ?? found.finish;
  });
  if (!steps.length) throw new ServiceError(0, "The model generated no token.");
  const drawn = await post("v1/completions", { ...body, processed_logprobs: true }, signal);
  const after = drawn.choices[0].logprobs;
  steps.forEach((step, index) => {
    const isSame = after.tokens[index] === step.token;
    step.drawn = isSame ? { ...after.top_logprobs[index], [step.token]: after.token_logprobs[index] } : {};
  });
  found.work = await arithmetic(tokens.count, steps.length);
  return found;
}

function sections(found) {
  return [
    section("Prompt", plural(found.tokens.count, "token"), promptTokens(found.tokens)),
    section("Shapes", "of each tensor, alone in its batch", shapes(found.work.stages)),
    section("Work", found.work.cost.dtype, work(found)),
    section("Steps", `${plural(found.steps.length, "token")}, ended by ${found.finish}`, steps(found)),
    h("p", {
      class: "note muted",
      text:
        "Times are measured in this browser. Work is computed from the model's config; the rates " +
        "divide it by the times, so they include the network and other requests.",
    }),
  ];
}

const section = (title, note, content) =>
  h("section", {}, h("h3", {}, title, h("small", { class: "muted", text: ` ${note}` })), content);

const promptTokens = ({ tokens, token_strs: texts }) =>
  h(
    "p",
    { class: "prompt-tokens" },
    tokens.map((id, index) =>
      h("span", { class: "piece" }, h("code", { text: visible(texts[index]) }), h("small", { text: id })),
    ),
  );

const size = (shape) => shape.map(count).join(" × ");

const shapes = (stages) =>
  table(
    ["tensor", "axes", "prefill", "decode"],
    stages.map((each) => [each.name, each.axes.replaceAll(" x ", " × "), size(each.prefill), size(each.decode)]),
  );

const flops = (value) => bytes(value).replace("B", "FLOP");

function work({ work: { cost }, usage }) {
  const rows = [
    [`prefill of ${plural(cost.prompt_tokens, "token")}`, cost.prefill],
    ["first decode", cost.first_decode],
    ["last decode", cost.last_decode],
    [`${plural(cost.output_tokens, "token")} with KV cache`, cost.with_cache],
    ["the same without KV cache", cost.without_cache],
  ];
  const cached = usage?.prompt_tokens_details?.cached_tokens || 0;
  return h(
    "div",
    {},
    h("p", {
      text:
        `${count(cost.parameters)} parameters, ${bytes(cost.weight_bytes)} of weights. ` +
        `KV cache: ${count(cost.kv_bytes_per_token)} B for each token, ${bytes(cost.kv_bytes)} now. ` +
        `${plural(cached, "prompt token")} came from the prefix cache.`,
    }),
    table(
      ["step", "FLOPs", "bytes", "FLOP/B"],
      rows.map(([name, each]) => [
        name,
        flops(each.flops),
        bytes(each.num_bytes),
        each.flops_per_byte.toFixed(1),
      ]),
    ),
  );
}

const steps = ({ steps: found, work: { steps: works } }) =>
  table(
    ["token", "probability", "drawn from", "time", "FLOPs", "bytes", "rate", "KV cache", "candidates"],
    found.map((step, index) => {
      const done = works[index];
      return [
        h("code", { text: visible(step.token) }),
        percent(step.logprob),
        after(step, step.token),
        step.seconds ? seconds(step.seconds) : "together",
        flops(done.flops),
        bytes(done.num_bytes),
        step.seconds ? `${rate(done.num_bytes / step.seconds / 1e9)} GB/s` : "–",
        bytes(done.kv_bytes),
        candidates(step),
      ];
    }),
  );

// Returns the probability after temperature and filters; a token that is not drawn has none.
const after = (step, token) => (token in step.drawn ? percent(step.drawn[token]) : "–");

const candidates = (step) =>
  h(
    "span",
    { class: "candidates" },
    Object.entries(step.top)
      .sort((a, b) => b[1] - a[1])
      .map(([token, logprob]) =>
        h(
          "span",
          { class: token === step.token ? "taken" : undefined },
          h("code", { text: visible(token) }),
          ` ${percent(logprob)} → ${after(step, token)}`,
        ),
      ),
  );

const table = (heads, rows) =>
  h(
    "div",
    { class: "wide-table" },
    h(
      "table",
      { class: "numbers" },
      h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col", text })))),
      h(
        "tbody",
        {},
        rows.map(([name, ...cells]) =>
          h("tr", {}, h("th", { scope: "row" }, name), cells.map((cell) => h("td", {}, cell))),
        ),
      ),
    ),
  );
