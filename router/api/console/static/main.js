// Starts the console: its views, its theme, its key and the state of its connection.

import { hasKey, setKey } from "./api.js";
import { byId, setAttribute, setText } from "./dom.js";
import * as overview from "./overview.js";
import * as playground from "./playground.js";
import * as recoveries from "./recoveries.js";
import * as requests from "./requests.js";
import { refresh, start, state, subscribe } from "./store.js";

const VIEWS = { overview, requests, recoveries, playground };
const PHASES = {
  loading: "Connecting",
  live: "Live",
  stale: "Stale",
  offline: "No answer",
  unauthorised: "Key needed",
  paused: "Paused",
};
const THEMES = ["system", "light", "dark"];

const tabs = [...byId("tabs").children];

function show(name) {
  const view = name || "overview";
  if (!(view in VIEWS)) return; // the target of the skip link
  for (const tab of tabs) {
    const isShown = tab.dataset.view === view;
    setAttribute(tab, "aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
    byId(tab.dataset.view).hidden = !isShown;
  }
}

// Does not set location.hash, because that takes the focus from the tab.
function go(view) {
  if (location.hash !== `#${view}`) history.pushState(null, "", `#${view}`);
  show(view);
}

function watchTabs() {
  for (const tab of tabs) tab.addEventListener("click", () => go(tab.dataset.view));
  byId("tabs").addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: 0, End: 0 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const now = tabs.indexOf(document.activeElement);
    let next = (now + moves[event.key] + tabs.length) % tabs.length;
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = tabs.length - 1;
    tabs[next].focus();
    go(tabs[next].dataset.view);
  });
  for (const event of ["popstate", "hashchange"])
    addEventListener(event, () => show(location.hash.slice(1)));
  show("overview");
  show(location.hash.slice(1));
}

function setTheme(theme) {
  setAttribute(document.documentElement, "data-theme", theme === "system" ? null : theme);
  const name = theme[0].toUpperCase() + theme.slice(1);
  setText(byId("theme"), name);
  byId("theme").setAttribute("aria-label", `Theme: ${theme}`);
  localStorage.setItem("tandem-theme", theme);
}

function watchTheme() {
  const stored = () =>
    THEMES.includes(localStorage.getItem("tandem-theme"))
      ? localStorage.getItem("tandem-theme")
      : "system";
  byId("theme").addEventListener("click", () =>
    setTheme(THEMES[(THEMES.indexOf(stored()) + 1) % THEMES.length]),
  );
  setTheme(stored());
}

let isRefused = false; // the service has refused the key

function askForKey(problem) {
  const dialog = byId("key-dialog");
  setText(byId("key-error"), problem);
  byId("key-forget").hidden = !hasKey();
  if (!dialog.open) dialog.showModal();
  byId("key-input").focus();
}

function watchKey() {
  byId("key").addEventListener("click", () => askForKey(""));
  byId("key-forget").addEventListener("click", () => {
    setKey("");
    byId("key-dialog").close();
    refresh({ forget: true });
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const input = byId("key-input");
    if (!/^[\x21-\x7e]+$/.test(input.value.trim()))
      return askForKey("A key has letters, digits and signs, but no spaces.");
    setKey(input.value.trim());
    input.value = "";
    byId("key-dialog").close();
    return refresh({ forget: true });
  });
}

function showConnection({ phase, problem, service, viewer }) {
  setText(byId("live"), PHASES[phase]);
  setAttribute(byId("live"), "data-state", phase);
  if (service) {
    const { service: name, model } = service;
    setText(byId("service"), name === model ? model : `${name} · ${model}`);
    document.title = `${name} · Tandem console`;
  } else {
    setText(byId("service"), "");
  }
  const retry = state.time ? "Trying again; the page shows the last values." : "Trying again.";
  const texts = { stale: `${problem} ${retry}`, offline: `${problem} ${retry}` };
  setText(byId("banner"), texts[phase] || "");
  byId("banner").hidden = !(phase in texts);
  setAttribute(byId("main"), "data-phase", phase);
  byId("key").hidden = !hasKey() && phase !== "unauthorised";
  setText(byId("key"), viewer && viewer.key ? `Key ${viewer.key}` : "Key");
  if (phase === "unauthorised" && !byId("key-dialog").open) {
    askForKey(hasKey() ? "The service does not know this key, or it has expired." : "");
    isRefused = true;
  } else if (phase === "live" && isRefused) {
    isRefused = false;
    byId("key-dialog").close();
  }
}

Object.values(VIEWS).forEach((view) => view.create());
watchTabs();
watchTheme();
watchKey();
subscribe(showConnection);
Object.values(VIEWS).forEach((view) => subscribe(view.update));
start();
