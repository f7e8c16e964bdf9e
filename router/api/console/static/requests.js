// Shows the running requests of this router, and a waterfall of the last ended ones.

import { byId, h, keyed, setAttribute, setText } from "./dom.js";
import { bytes, clock, count, plural, seconds, shortId } from "./format.js";
import { legend, stageBar, stageTable, updateBar } from "./stages.js";

const FILTERS = [
  ["all", "All", () => true],
  ["failed", "Failed", (request) => isFailed(request)],
  ["recovered", "Recovered", (request) => request.interruptions.length > 0],
];
const GOOD = new Set(["stop", "length", "tool_calls", "time", "repetition", "cancelled"]);
const isFailed = (request) => !request.finish.split(", ").every((reason) => GOOD.has(reason));

let running;
let ended;
let filter = FILTERS[0];
let ownScale = false;
let last;

export function create() {
  running = h("div", { class: "panel list", role: "list", "aria-label": "Running requests" });
  ended = h("div", {
    class: "panel list waterfall",
    role: "list",
    "aria-label": "Ended requests, the newest first",
  });
  const choices = FILTERS.map((each) =>
    h("button", {
      class: "quiet",
      "aria-pressed": String(each === filter),
      text: each[1],
      onclick: (event) => choose(event.currentTarget, each),
    }),
  );
  const scale = h("button", {
    class: "quiet",
    "aria-pressed": "false",
    text: "Same width",
    title: "Draw each request over the whole width, to compare the shares of its stages",
    onclick: () => {
      ownScale = !ownScale;
      setAttribute(scale, "aria-pressed", String(ownScale));
      update(last);
    },
  });
  byId("requests").append(
    h(
      "div",
      { class: "heading" },
      h("h2", { text: "Running" }),
      h("span", { class: "muted", id: "running-count" }),
    ),
    running,
    h("p", { class: "empty", id: "running-empty" }),
    h(
      "div",
      { class: "heading" },
      h("h2", { text: "Ended" }),
      h("div", { class: "group", role: "group", "aria-label": "Filter" }, choices),
      scale,
      legend(),
    ),
    ended,
    h("p", { class: "empty", id: "ended-empty" }),
  );
}

function choose(button, chosen) {
  filter = chosen;
  [...button.parentNode.children].forEach((each) =>
    setAttribute(each, "aria-pressed", String(each === button)),
  );
  update(last);
}

const keyOf = (request) => `${request.id} ${request.began}`;
const tokens = (request) => `${count(request.prompt_tokens)} → ${count(request.tokens)}`;

function createRunning(request) {
  return h(
    "div",
    { class: "request", role: "listitem" },
    h("span", { class: "badge" }),
    h("code", { class: "id", text: request.id, title: request.id }),
    h("span", { class: "tenant", text: request.tenant }),
    h("span", { class: "tokens", title: "prompt → output tokens" }),
    h("span", { class: "place" }),
    h("span", { class: "ttft" }),
    h("span", { class: "total" }),
  );
}

function updateRunning(node, request) {
  const [state, , , tokenCell, place, ttft, total] = node.children;
  setText(
    state,
    request.interruptions.length ? `${request.state}, attempt ${request.attempts}` : request.state,
  );
  setAttribute(state, "data-state", request.state);
  setText(tokenCell, tokens(request));
  setText(place, request.workers[1] ? shortId(request.workers[1]) : "waiting");
  setText(ttft, request.ttft ? `TTFT ${seconds(request.ttft)}` : "");
  setText(total, seconds(request.total));
}

function createEnded(request) {
  const details = h("div", {
    class: "details",
    id: `details-${keyOf(request).replaceAll(/[^\w-]/g, "_")}`,
    hidden: true,
  });
  const row = h(
    "button",
    { class: "request", "aria-expanded": "false", "aria-controls": details.id },
    h("time", { text: clock(request.began) }),
    h("span", {
      class: "badge",
      "data-state": isFailed(request)
        ? "error"
        : request.finish === "cancelled"
          ? "cancelled"
          : "done",
      text: request.finish.replaceAll("_", " "),
    }),
    h("code", { class: "id", text: request.id, title: request.id }),
    h("span", { class: "tokens", title: "prompt → output tokens", text: tokens(request) }),
    stageBar(),
    h("span", { class: "ttft", text: request.ttft ? `TTFT ${seconds(request.ttft)}` : "" }),
    h("span", { class: "total", text: seconds(request.total) }),
  );
  row.addEventListener("click", () => {
    const isOpen = row.getAttribute("aria-expanded") === "true";
    row.setAttribute("aria-expanded", String(!isOpen));
    if (!details.firstChild) details.append(stageTable(request), facts(request));
    details.hidden = isOpen;
  });
  return h("div", { role: "listitem" }, row, details);
}

function facts(request) {
  const moved = request.transport
    ? `${bytes(request.kv_bytes)} by ${request.transport}, ${seconds(request.kv_active)} in transfer`
    : "none";
  const rows = [
    ["Model", request.model],
    ...(request.tenant ? [["Tenant", request.tenant]] : []),
    ["Prompt", `${plural(request.prompt_tokens, "token")}, ${count(request.cached_tokens)} cached`],
    ["Output", plural(request.tokens, "token")],
    ["Time per output token", request.tpot ? seconds(request.tpot) : "–"],
    ["Prefill worker", request.workers[0] || "–"],
    ["Decode worker", request.workers[1] || "–"],
    ["KV cache", moved],
    ["Attempts", count(request.attempts)],
    ...request.interruptions.map(([at, cause, worker]) => [
      `Interrupted at ${seconds(at)}`,
      `${cause} on ${worker}`,
    ]),
  ];
  return h(
    "dl",
    { class: "facts" },
    rows.map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: value }))),
  );
}

export function update(state) {
  last = state;
  if (!state) return;
  const { viewer } = state;
  const shown = [...state.running].reverse();
  keyed(running, shown, keyOf, createRunning, updateRunning);
  running.hidden = !shown.length;
  setText(
    byId("running-count"),
    state.numRunning > shown.length
      ? `${count(state.numRunning)}, the newest ${shown.length} are shown`
      : count(state.numRunning),
  );
  const whose =
    viewer && !viewer.sees_all ? (viewer.tenant ? ` of tenant ${viewer.tenant}` : "") : "";
  const isHidden = viewer && !viewer.sees_all && !viewer.tenant;
  setText(
    byId("running-empty"),
    shown.length || !viewer
      ? ""
      : isHidden
        ? "Without a key, the page shows requests on loopback only."
        : `No request${whose} is running.`,
  );
  const found = state.ended.filter(filter[2]).reverse();
  const longest = Math.max(...found.map((request) => request.total), 1e-6);
  keyed(ended, found, keyOf, createEnded, (node, request) =>
    updateBar(node.querySelector(".bar"), request, ownScale ? request.total || 1 : longest),
  );
  ended.hidden = !found.length;
  setText(
    byId("ended-empty"),
    found.length || !viewer
      ? ""
      : filter[0] === "all"
        ? `No request${whose} has ended yet.`
        : "None of the last requests match.",
  );
}
