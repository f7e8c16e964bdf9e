// Shows failures and recoveries: requests that moved to another worker, workers that joined or left
// the pools.

import { byId, h, keyed } from "./dom.js";
import { clock, count } from "./format.js";

const CAUSES = {
  full: "the worker's queue or KV cache was full",
  gone: "the worker is draining or has left",
  crash: "the worker was lost",
  transfer: "the KV cache could not be fetched",
  preempted: "the worker needed the blocks for older sequences",
  suspended: "the worker is draining or has another role; the KV cache moves with the request",
  invalid: "the worker refused the request",
  unable: "the worker cannot serve it: an adapter's file, memory or a grammar",
  not_finite: "the model computed NaN or infinity",
  joined: "joined the pool",
  left: "left the pool",
  restarted: "restarted, with a new epoch",
  switched: "has the other role, with a new epoch",
  draining: "takes no new requests",
};
const BAD = new Set(["crash", "left", "transfer", "invalid", "unable", "not_finite"]);

let list;
let empty;
let summary;

export function create() {
  summary = h("span", { class: "muted" });
  list = h("ol", { class: "panel list events", "aria-label": "Recoveries, the newest first" });
  empty = h("p", { class: "empty" });
  byId("recoveries").append(
    h("div", { class: "heading" }, h("h2", { text: "Recoveries" }), summary),
    list,
    empty,
  );
}

function createEvent(event) {
  const subject = event.kind === "worker" ? event.worker : event.request;
  const what =
    event.kind === "worker"
      ? `Worker ${CAUSES[event.cause] || event.cause}`
      : `Request continues on another worker: ${CAUSES[event.cause] || event.cause}`;
  return h(
    "li",
    { class: "event" },
    h("time", { text: clock(event.time) }),
    h("span", {
      class: "badge",
      "data-state": BAD.has(event.cause) ? "error" : event.cause === "joined" ? "done" : "warn",
      text: event.cause,
    }),
    h("span", { class: "what", text: what }),
    h("code", { text: subject, title: subject }),
    event.kind === "request" ? h("span", { class: "muted", text: `on ${event.worker}` }) : null,
  );
}

export function update(state) {
  const events = [...state.events].reverse();
  keyed(
    list,
    events,
    (event) => `${event.time} ${event.kind} ${event.cause} ${event.worker} ${event.request || ""}`,
    createEvent,
    () => {},
  );
  list.hidden = !events.length;
  const recovered = events.filter((event) => event.kind === "request").length;
  summary.textContent = events.length
    ? `${count(recovered)} of requests, ${count(events.length - recovered)} of workers`
    : "";
  empty.textContent =
    events.length || !state.viewer ? "" : "No failures since this router started.";
}
