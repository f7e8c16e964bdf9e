// Holds the state of the service, and polls it: once a second, less often while the service does
// not answer, and never while the tab is hidden.

import { poll } from "./api.js";

const POLL_MS = 1000;
const MAX_WAIT_MS = 8000;
const STALE_MS = 4000;
const BOUNDS = { samples: 300, ended: 128, events: 128 };

const nothing = () => ({
  phase: "loading", // loading, live, stale, offline, unauthorised or paused
  problem: "",
  service: null,
  viewer: null,
  running: [],
  numRunning: 0,
  samples: [],
  ended: [],
  events: [],
  time: 0,
});

export const state = nothing();

const listeners = [];
let cursor = "";
let generation = 0; // grows with each change of the key
let timer = 0;
let failures = 0;
let polling = false;
let again = false;
let lastAnswer = 0;

export const subscribe = (listener) => listeners.push(listener);
const publish = () => listeners.forEach((listener) => listener(state));

function take(found) {
  if (found.is_whole) for (const name of Object.keys(BOUNDS)) state[name] = [];
  for (const [name, bound] of Object.entries(BOUNDS))
    state[name] = [...state[name], ...found[name]].slice(-bound);
  state.service = found.service;
  state.viewer = found.viewer;
  state.running = found.running;
  state.numRunning = found.num_running;
  state.time = found.time;
  cursor = found.cursor;
}

function succeed(found) {
  take(found);
  lastAnswer = performance.now();
  state.phase = "live";
  state.problem = "";
  failures = 0;
}

function fail(error) {
  if (error.status === 401) {
    state.phase = "unauthorised";
    return;
  }
  failures += 1;
  state.phase = state.time && performance.now() - lastAnswer < STALE_MS ? "stale" : "offline";
  state.problem = error.message;
}

async function turn() {
  timer = 0;
  if (document.hidden || polling) return;
  polling = true;
  const began = performance.now();
  const asked = generation;
  try {
    const found = await poll(cursor);
    if (asked === generation) succeed(found);
  } catch (error) {
    if (asked === generation) fail(error);
  }
  polling = false;
  publish();
  if (again) {
    again = false;
    schedule(0);
  } else if (state.phase !== "unauthorised") {
    const wait = failures ? Math.min(POLL_MS * 2 ** failures, MAX_WAIT_MS) : POLL_MS;
    schedule(Math.max(0, wait - (performance.now() - began)));
  }
}

function schedule(milliseconds) {
  clearTimeout(timer);
  timer = setTimeout(turn, milliseconds);
}

// Polls at once: at the start, with another key, or for a request that has just ended. `forget`: the
// key is another one, so the data of the old key goes, also that of a poll that has not ended.
export function refresh({ forget = false } = {}) {
  if (forget) {
    generation += 1;
    cursor = "";
    Object.assign(state, nothing());
    publish();
  }
  if (polling) again = true;
  else schedule(0);
}

export function start() {
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      clearTimeout(timer);
      state.phase = "paused";
    } else {
      refresh();
    }
  });
  refresh();
}
