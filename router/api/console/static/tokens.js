// Shows the tokens of an answer, shaded by their probabilities, and the alternatives of the chosen
// token. The pointer chooses a token, or the arrow keys while the answer has the focus.

import { h, setStyle } from "./dom.js";

export const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
export const visible = (text) =>
  text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "∅";

export class TokenView {
  constructor() {
    this.entries = [];
    this.chosen = -1;
    this.decoder = new TextDecoder();
    this.text = h("div", {
      class: "tokens-text",
      tabindex: 0,
      role: "group",
      "aria-label": "Tokens of the answer. Arrow keys choose one.",
    });
    this.inspector = h("div", { class: "inspector", "aria-live": "polite", hidden: true });
    this.text.addEventListener("keydown", (event) => this.step(event));
    this.text.addEventListener("focus", () => this.chosen < 0 && this.choose(0));
    this.text.addEventListener("click", (event) =>
      this.choose([...this.text.children].indexOf(event.target)),
    );
  }

  // `entry`: of logprobs.content; `isSaid`: false for a stop token, which is not part of the text.
  add(entry, isSaid) {
    const text = entry.bytes
      ? this.decoder.decode(new Uint8Array(entry.bytes), { stream: true })
      : entry.token;
    const node = h("span", { class: isSaid ? "token" : "token special", text: text || "\u200b" });
    setStyle(node, "--doubt", (1 - Math.exp(entry.logprob)).toFixed(3));
    this.entries.push(entry);
    this.text.append(node);
  }

  step(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !this.entries.length) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(this.entries.length - 1, this.chosen + moves[event.key])));
  }

  choose(index) {
    const entry = this.entries[index];
    if (!entry) return;
    this.text.children[this.chosen]?.classList.remove("chosen");
    this.chosen = index;
    this.text.children[index].classList.add("chosen");
    const rows = [
      entry,
      ...(entry.top_logprobs || []).filter(
        (each) => each.token !== entry.token || each.logprob !== entry.logprob,
      ),
    ].sort((a, b) => b.logprob - a.logprob);
    this.inspector.hidden = false;
    this.inspector.replaceChildren(
      h(
        "p",
        {},
        `Token ${index + 1} of ${this.entries.length} `,
        h("code", { text: visible(entry.token) }),
        ` ${percent(entry.logprob)}`,
      ),
      h(
        "ul",
        { class: "alternatives" },
        rows.map((each) => {
          const bar = h("i");
          setStyle(bar, "width", percent(each.logprob).replace(" ", ""));
          return h(
            "li",
            { class: each === entry ? "taken" : undefined },
            h("code", { text: visible(each.token) }),
            h("span", { class: "meter" }, bar),
            h("span", { class: "value", text: percent(each.logprob) }),
            h("span", { class: "value muted", text: each.logprob.toFixed(3) }),
          );
        }),
      ),
    );
  }
}
