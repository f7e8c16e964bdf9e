// Shows the parts of the timeline of a request, in order; they add up to its total time.

import { h, setStyle } from "./dom.js";
import { seconds } from "./format.js";

export const STAGES = [
  ["tokenize", "Tokenize", "checks, chat template and tokenizer in the router"],
  ["queue", "Queue", "waiting in the queues of the workers"],
  [
    "dispatch",
    "Dispatch",
    "the way to the prefill worker and back, and time lost to interruptions",
  ],
  ["restore", "Restore", "reading cached KV from the disk or another worker"],
  ["prefill", "Prefill", "the prefill worker computes the prompt, until the first token"],
  ["transfer", "KV transfer", "the rest of the transfer after the first token"],
  ["decode", "Decode", "from the arrival of the KV cache to the last token"],
];

export function legend() {
  return h(
    "ul",
    { class: "legend", "aria-label": "Stages" },
    STAGES.map(([id, name, what]) =>
      h("li", { title: what }, h("i", { class: `swatch stage-${id}` }), name),
    ),
  );
}

const told = (request) =>
  STAGES.map(([, name], index) => `${name} ${seconds(request.stages[index])}`).join(", ");

// Returns a bar; `updateBar` fills it, with a whole width of `scale` seconds.
export function stageBar() {
  return h(
    "div",
    { class: "bar", role: "img" },
    STAGES.map(([id]) => h("i", { class: `stage-${id}` })),
  );
}

export function updateBar(bar, request, scale) {
  bar.setAttribute("aria-label", told(request));
  [...bar.children].forEach((part, index) =>
    setStyle(
      part,
      "width",
      `${((100 * Math.max(request.stages[index] || 0, 0)) / scale).toFixed(3)}%`,
    ),
  );
}

// Returns a table of the numbers of a bar, with their sum.
export function stageTable(request) {
  const rows = STAGES.map(([id, name, what], index) =>
    h(
      "tr",
      {},
      h("th", { scope: "row", title: what }, h("i", { class: `swatch stage-${id}` }), name),
      h("td", { text: seconds(request.stages[index]) }),
      h("td", {
        class: "share",
        text: `${((100 * request.stages[index]) / (request.total || 1)).toFixed(1)} %`,
      }),
    ),
  );
  const sum = request.stages.reduce((total, each) => total + each, 0);
  return h(
    "table",
    { class: "numbers stages" },
    h("caption", { class: "hidden-label", text: "Stages of the request" }),
    h("tbody", {}, rows),
    h(
      "tfoot",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "row", text: "Total" }),
        h("td", { text: seconds(sum) }),
        h("td", { class: "share", text: "100 %" }),
      ),
    ),
  );
}
