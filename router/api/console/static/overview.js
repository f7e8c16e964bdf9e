// Shows the current figures of the service, charts of the last minutes, and the pools with their
// workers.

import { Chart } from "./chart.js";
import { byId, h, keyed, setAttribute, setStyle, setText } from "./dom.js";
import { axisSeconds, count, plural, rate, seconds, shortId, watts } from "./format.js";

const RECENT = 10; // samples that the current figures use
const BLOCKS = [
  ["owned", "owned by sequences"],
  ["leased", "leased to other workers"],
  ["reserved", "reserved for growth"],
  ["cached", "prefix cache"],
  ["free", "free"],
];
const HIDDEN = "shown to operators";
const POOLS = [
  ["prefill", "Prefill pool", "turns prompts into KV cache"],
  ["decode", "Decode pool", "turns KV cache into tokens"],
];

let figures;
let charts;
let pools;
let routers;

const figure = (id, name) =>
  h(
    "div",
    { class: "figure", id: `figure-${id}` },
    h("dt", { text: name }),
    h("dd", {}, h("b", { text: "–" }), h("small")),
  );

export function create() {
  figures = h(
    "dl",
    { class: "figures", "aria-label": "Now" },
    figure("running", "Running"),
    figure("queued", "Queued"),
    figure("output", "Output"),
    figure("ttft", "TTFT p50"),
    figure("tpot", "TPOT p50"),
    figure("workers", "Workers"),
  );
  const percentile = (name, index) => (sample) => (sample[name] ? sample[name][index] : null);
  charts = [
    new Chart(
      "Time to first token",
      [
        { id: "p50", name: "p50", of: percentile("ttft", 0) },
        { id: "p95", name: "p95", of: percentile("ttft", 1) },
      ],
      { format: seconds, axis: axisSeconds, least: 0.01 },
    ),
    new Chart(
      "Time per output token",
      [
        { id: "p50", name: "p50", of: percentile("tpot", 0) },
        { id: "p95", name: "p95", of: percentile("tpot", 1) },
      ],
      { format: seconds, axis: axisSeconds, least: 0.005 },
    ),
    new Chart(
      "Throughput, tokens/s",
      [
        { id: "output", name: "output", of: (sample) => sample.tokens / sample.seconds },
        { id: "prompt", name: "prompt", of: (sample) => sample.prompt_tokens / sample.seconds },
      ],
      { format: rate, axis: count, least: 10 },
    ),
  ];
  pools = h("div", { class: "pools" });
  routers = h("ul", { class: "routers" });
  const states = h(
    "ul",
    { class: "legend", "aria-label": "States of KV blocks" },
    BLOCKS.map(([id, name]) => h("li", {}, h("i", { class: `swatch block-${id}` }), name)),
  );
  byId("overview").append(
    figures,
    h(
      "div",
      { class: "charts" },
      charts.map((chart) => chart.figure),
    ),
    h("div", { class: "heading" }, h("h2", { text: "Pools" }), states),
    pools,
    h(
      "div",
      { class: "heading" },
      h("h2", { text: "Routers" }),
      h("p", {
        class: "muted",
        text: "This page shows the requests and times of the router that serves it.",
      }),
    ),
    routers,
  );
}

function setFigure(id, text, note = "") {
  const [value, small] = byId(`figure-${id}`).lastChild.children;
  setText(value, text);
  setText(small, note);
}

function latest(samples, name) {
  for (const sample of [...samples].reverse()) if (sample[name]) return sample[name];
  return [null, null];
}

function updateFigures({ samples, service, phase }) {
  const recent = samples.slice(-RECENT);
  const last = recent[recent.length - 1];
  const sum = (name) => recent.reduce((total, sample) => total + sample[name], 0);
  setFigure("running", last ? count(last.running - last.queued) : "–", "requests");
  setFigure("queued", last ? count(last.queued) : "–", "requests");
  setFigure("output", rate(last ? sum("tokens") / sum("seconds") : null), "tokens/s");
  for (const name of ["ttft", "tpot"]) {
    const [middle, high] = latest(samples, name);
    setFigure(name, seconds(middle), high === null ? "" : `p95 ${seconds(high)}`);
  }
  const workers = service ? service.workers : [];
  const ready = workers.filter((worker) => worker.state === "ready").length;
  setFigure("workers", service ? `${ready} / ${workers.length}` : "–", "ready");
  setAttribute(
    byId("figure-workers"),
    "data-state",
    service && ready < workers.length ? "warn" : null,
  );
  setAttribute(figures, "aria-busy", phase === "loading");
}

function createWorker(worker) {
  const cell = (name, label, ...children) =>
    h("div", { class: `cell cell-${name}`, role: "cell", "data-label": label }, ...children);
  return h(
    "div",
    { class: "worker", role: "row" },
    cell(
      "id",
      "Worker",
      h("code", { text: shortId(worker.id), title: worker.id }),
      h("span", { class: "badge" }),
    ),
    cell("load", "Load", h("b"), h("small")),
    cell(
      "blocks",
      "KV blocks",
      h(
        "div",
        { class: "bar", role: "img" },
        BLOCKS.map(([id]) => h("i", { class: `block-${id}` })),
      ),
      h("small"),
    ),
    cell("transfers", "Transfers", h("b"), h("small")),
    cell("step", "Step", h("b"), h("small")),
    cell("transports", "Pulls by", h("span")),
    cell("epoch", "Ranks · epoch", h("span")),
  );
}

function updateWorker(node, worker) {
  const load = worker.load || {}; // a key of one tenant does not get it
  const [id, loads, blocks, transfers, step, transports, epoch] = node.children;
  const isSilent = worker.state === "silent";
  setText(id.lastChild, worker.integrity_ok || isSilent ? worker.state : "block counts are wrong");
  setAttribute(
    id.lastChild,
    "data-state",
    worker.integrity_ok || isSilent ? worker.state : "error",
  );
  setText(loads.children[0], count(load.num_running));
  const waiting = load.num_waiting ? `${count(load.num_waiting)} waiting` : "running";
  setText(loads.children[1], worker.load ? waiting : "");
  const [bar, note] = blocks.children;
  const total = load.total_blocks || 1;
  BLOCKS.forEach(([state], index) =>
    setStyle(
      bar.children[index],
      "width",
      `${((100 * (load[`${state}_blocks`] || 0)) / total).toFixed(2)}%`,
    ),
  );
  setAttribute(
    bar,
    "aria-label",
    worker.load
      ? BLOCKS.map(([state]) => `${state} ${load[`${state}_blocks`]}`).join(", ")
      : HIDDEN,
  );
  const held = load.owned_blocks + load.leased_blocks + load.reserved_blocks;
  const states = worker.num_states
    ? `; ${count(load.held_states)} of ${count(worker.num_states)} states held`
    : "";
  setText(
    note,
    worker.load
      ? `${count(held)} held, ${count(load.cached_blocks)} cached of ${count(load.total_blocks)}${states}`
      : HIDDEN,
  );
  setText(transfers.children[0], count(worker.num_transfers));
  setText(transfers.children[1], worker.load ? plural(worker.num_leases, "lease") : "");
  setText(step.firstChild, load.step_seconds ? seconds(load.step_seconds) : "–");
  const power = [
    ["CPU", worker.cpu_power_watts], // of the host, also of other workers
    ["GPU", worker.gpu_power_watts],
  ].filter(([, value]) => value !== undefined);
  setText(step.lastChild, power.map(([unit, value]) => `${unit} ${watts(value)}`).join(" · "));
  setText(transports.firstChild, [...new Set(Object.values(worker.transports))].join(", ") || "–");
  setAttribute(
    transports.firstChild,
    "title",
    Object.entries(worker.transports)
      .map(([rank, name]) => `${rank} ${name}`)
      .join("\n"),
  );
  setText(epoch.firstChild, `${worker.tp} · ${worker.epoch.slice(-6)}`);
  setAttribute(epoch.firstChild, "title", `epoch ${worker.epoch}, ${worker.address}`);
  setAttribute(node, "data-state", worker.state);
}

const HEADS = ["Worker", "Load", "KV blocks", "Transfers", "Step", "Pulls by", "Ranks · epoch"];

function createPool([role, name, what]) {
  const head = h(
    "div",
    { class: "worker head", role: "row" },
    HEADS.map((label) => h("div", { role: "columnheader", text: label })),
  );
  const body = h("div", { role: "rowgroup" });
  return h(
    "section",
    { class: "panel pool", "aria-labelledby": `pool-${role}` },
    h(
      "header",
      {},
      h("h3", { id: `pool-${role}`, text: name }),
      h("span", { class: "muted" }),
      h("span", { class: "muted what", text: what }),
    ),
    h("div", { role: "table", "aria-label": name }, h("div", { role: "rowgroup" }, head), body),
    h("p", { class: "empty" }),
  );
}

function updatePool(node, [role], service) {
  const workers = service ? service.workers.filter((worker) => worker.role === role) : [];
  const [header, table, empty] = node.children;
  setText(header.children[1], service ? plural(workers.length, "worker") : "");
  keyed(table.lastChild, workers, (worker) => worker.id, createWorker, updateWorker);
  table.hidden = !workers.length;
  empty.hidden = workers.length > 0;
  setText(
    empty,
    service
      ? role === "prefill"
        ? "No workers: decode workers also prefill."
        : "No workers."
      : "",
  );
}

const page = (router) => router.console || `http://${router.http}/console`;

function updateRouters(service) {
  const isHere = (router) => page(router).startsWith(`${location.origin}/`);
  keyed(
    routers,
    service ? service.routers : [],
    (router) => router.id,
    (router) =>
      h(
        "li",
        {},
        isHere(router)
          ? h("code", { text: router.id })
          : h("a", { href: page(router), rel: "noreferrer" }, h("code", { text: router.id })),
        h("span", { class: "muted", text: `gRPC ${router.grpc}` }),
        h("span", { class: "muted", text: `HTTP ${router.http}` }),
        isHere(router) ? h("span", { class: "badge", text: "this router" }) : null,
      ),
    () => {},
  );
}

export function update(state) {
  updateFigures(state);
  charts.forEach((chart) => chart.show(state.samples));
  keyed(
    pools,
    POOLS,
    ([role]) => role,
    createPool,
    (node, pool) => updatePool(node, pool, state.service),
  );
  setAttribute(pools, "aria-busy", state.service === null);
  updateRouters(state.service);
}
