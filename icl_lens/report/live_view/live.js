// Draw a live view. Every number comes from Python and is shown only while it belongs to what the view shows:
// a panel carries the ids of its text and, if it depends on them, of the chosen heads.

const CHANGES = { removed: "removed", query: "query exchanged", keys: "keys exchanged", values: "values exchanged" };
const MAPS = { contrast: "contrast", increase: "increase", effect: "effect", exchange: "query exchanged" };
const MEANING = {
  contrast: "Who writes the answer: what a head adds to log p(answer) − log p(other labels). Others may make up for it; see effect.",
  increase: "Who writes the answer or all labels: what a head adds to log p(answer).",
  effect: "Who is needed: what the answer’s log-odds lose if the head is removed at the last position.",
  exchange: "Who compares the query: what the answer’s log-odds lose if the head’s query is that of another text.",
};
const SOURCES = { query: "Queries are those of", keys: "Texts exchanged; keys are those of", values: "Labels exchanged; values are those of" };
const WAYS = { hidden: "not seen by the last token", keys: "its attention goes elsewhere, its values are read", values: "its values are not read" };
const PATIENCE = 20_000; // milliseconds without an answer after which the kernel is said to be silent

const signed = (x, digits = 2) => {
  const size = Math.abs(x).toFixed(digits);
  return (Number(size) === 0 ? "" : x < 0 ? "−" : "+") + size;
};
const percent = (x) => (x > 0 && x < 0.0005 ? "<0.1 %" : (100 * x).toFixed(1) + " %");

/** Return an element; text is never read as HTML. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (typeof value === "boolean") element.toggleAttribute(name, value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const visible = (text) => (text.trim() ? text : text ? "␣".repeat(text.length) : "∅");

/** Light or dark, as the notebook around the view says, else as the system does. */
function theme(root) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => { root.dataset.theme = hostTheme(document.body) || (system.matches ? "dark" : "light"); };
  apply();
  system.addEventListener("change", apply);
  const watch = new MutationObserver(apply);
  for (const element of [document.documentElement, document.body]) watch.observe(element, { attributes: true });
  return () => (watch.disconnect(), system.removeEventListener("change", apply));
}

export default {
  render({ model, el }) {
    const about = model.get("_about");
    const own = Math.random().toString(36).slice(2, 8); // ids of this view's edits differ from those of all others
    let edits = 0, asked = 0, silence = null;

    const look = () => model.get("_look");
    const state = () => look().state;
    const root = el.appendChild(h("section", { class: "icl-live", "aria-label": `Live view of ${about.model}` }));
    const stopTheme = theme(root);

    // The static version of this view in the same output is for notebooks without a kernel.
    const hide = document.head.appendChild(h("style"));
    hide.textContent = `#${CSS.escape(about.id)} { display: none }`;

    /** Return a panel if it belongs to what is shown, else null. */
    const panel = (name) => {
      const found = model.get(`_${name}`), now = look();
      if (found.text === undefined || found.text !== now.text) return null;
      return about.of_choice.includes(name) || name === "status" ? (found.pick === now.pick ? found : null) : found;
    };

    /** Show another state; `text` says whether the prompt changes. */
    function show(changes, text) {
      const id = `${own}${++edits}`, now = look();
      model.set("_look", { state: { ...state(), ...changes }, text: text ? id : now.text, pick: id });
      model.save_changes();
      asked = Date.now();
      clearTimeout(silence);
      silence = setTimeout(draw, PATIENCE + 100);
    }
    const edit = (changes) => show(changes, true);
    const pick = (changes) => show(changes, false);

    // ---- The prompt ----
    const rows = h("ol", { class: "rows" });
    const ways = h("p", { class: "ways note", "aria-hidden": "true" },
      h("span", { class: "effects" }, ...Object.entries(WAYS).map(([way, title]) => h("span", { title }, way))));
    const query = h("input", { class: "text", "aria-label": "Query", oninput: () => edit({ query: query.value }) });
    const answer = h("select", { "aria-label": "Answer", onchange: () => edit({ answer: answer.value || null }) });
    const shown = () => state().demonstrations;
    const changed = (change) => {
      const list = shown().map((one) => [...one]);
      change(list);
      edit({ demonstrations: list });
    };
    const labels = () => [...new Set([...shown().map(([, label]) => label), ...(state().labels || [])])].filter((one) => one.trim()).sort();

    function row(index) {
      const text = h("input", { class: "text", "aria-label": `Text ${index + 1}`,
        oninput: () => changed((list) => { list[index][0] = text.value; }) });
      const label = h("input", { class: "label", "aria-label": `Label ${index + 1}`,
        oninput: () => changed((list) => { list[index][1] = label.value; }) });
      const button = (name, sign, change) => h("button", { type: "button", title: name,
        "aria-label": `${name}, demonstration ${index + 1}`, onclick: () => change() }, sign);
      const move = (by) => () => {
        const to = index + by;
        if (to < 0 || to >= shown().length) return;
        changed((list) => { [list[index], list[to]] = [list[to], list[index]]; });
        rows.children[to].querySelector(by < 0 ? ".up" : ".down").focus();
      };
      const up = button("Move up", "↑", move(-1)), down = button("Move down", "↓", move(1));
      up.className = "up";
      down.className = "down";
      const other = button("Give the next label", "⇄", () => changed((list) => {
        const all = labels();
        list[index][1] = all[(all.indexOf(list[index][1]) + 1) % all.length];
      }));
      const remove = button("Remove", "×", () => changed((list) => { list.splice(index, 1); }));
      const effects = Object.entries(WAYS).map(([way, title]) => h("span", { class: "effect", "data-way": way, title }));
      const item = h("li", {}, text, label, h("span", { class: "effects" }, ...effects), h("span", { class: "tools" }, up, down, other, remove));
      return Object.assign(item, { fields: { text, label, effects } });
    }

    const exchange = () => changed((list) => {
      const all = [...new Set(list.map(([, label]) => label))].sort();
      for (const one of list) one[1] = all[(all.indexOf(one[1]) + 1) % all.length];
    });
    const add = () => {
      changed((list) => { const last = list[list.length - 1]; list.push(["new text", last ? last[1] : "label"]); });
      rows.lastElementChild.fields.text.focus();
      rows.lastElementChild.fields.text.select();
    };
    const status = h("p", { class: "status", role: "status", "aria-live": "polite" });
    const progress = h("progress", { max: 6, value: 0, "aria-label": "Computed" });
    const totals = h("p", { class: "note" });

    // ---- The answer ----
    const outcome = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Answer" });
    const next = h("p", { class: "note" });
    const pin = h("button", { type: "button", onclick: () => {
      const found = panel("answer");
      if (!found) return;
      const pins = model.get("_pins"), change = panel("change");
      const last = pins.length ? pins[pins.length - 1].name.charCodeAt(0) - 64 : 0;
      const name = String.fromCharCode(65 + (last % 26));
      const pinned = { name, state: state(), answer: found, change: change && change.probs ? change : null };
      model.set("_pins", [...pins, pinned].slice(-about.max_pins));
      model.save_changes();
    } }, "Pin");
    const code = h("pre", { tabindex: 0 });
    const box = h("details", { class: "code" }, h("summary", {}, "Python"), code);
    const copy = h("button", { type: "button", onclick: async () => {
      const found = panel("code");
      if (!found) return;
      box.open = true;
      try { await navigator.clipboard.writeText(found.python); copy.textContent = "Copied"; }
      catch { getSelection().selectAllChildren(code); copy.textContent = "Selected: press Ctrl+C"; }
      setTimeout(() => { copy.textContent = "Copy as Python"; }, 2000);
    } }, "Copy as Python");

    // ---- The heads ----
    const tabs = h("div", { class: "tabs", role: "group", "aria-label": "Score of all heads" },
      ...Object.entries(MAPS).map(([by, name]) => h("button", { type: "button", "data-by": by, title: MEANING[by],
        onclick: () => { ofAtlas = null; pick({ by }); draw(); } }, name)));
    let ofAtlas = null; // the score of the atlas that the map shows
    const atlas = h("select", { "aria-label": "Score of the atlas", hidden: !about.atlas.length,
      onchange: () => { ofAtlas = about.atlas.find((score) => score.name === atlas.value) || null; draw(); } },
      h("option", { value: "" }, "from the atlas…"), ...about.atlas.map((score) => h("option", { value: score.name }, score.title)));
    tabs.append(atlas);
    const cells = h("div", { class: "cells", role: "group", "aria-label": "Heads by layer",
      style: { "--layers": about.layers, "--heads": about.heads } });
    const readout = h("p", { class: "readout", "aria-live": "polite" });
    const meaning = h("p", { class: "note" });
    const buttons = [];
    let focused = 0, pointed = null;
    const name = (index) => `L${Math.floor(index / about.heads)}H${index % about.heads}`;
    cells.append(h("span", { class: "corner" }), ...Array.from({ length: about.heads }, (_, i) => h("span", {}, String(i))));
    for (let layer = 0; layer < about.layers; layer++) {
      cells.append(h("span", {}, String(layer)));
      for (let head = 0; head < about.heads; head++) {
        const index = layer * about.heads + head;
        const button = h("button", { type: "button", tabindex: index ? -1 : 0, "data-head": name(index),
          onclick: () => choose(index), onfocus: () => aim(index), onpointerenter: () => tell(index) });
        buttons.push(button);
        cells.append(button);
      }
    }
    function choose(index) {
      const head = name(index), heads = state().heads;
      const change = state().by === "exchange" && !heads.length ? { change: "query" } : {}; // what the map shows
      pick({ heads: heads.includes(head) ? heads.filter((one) => one !== head) : [...heads, head], ...change });
    }
    function aim(index) {
      buttons[focused].tabIndex = -1;
      focused = index;
      buttons[index].tabIndex = 0;
      tell(index);
    }
    function tell(index) {
      pointed = index;
      readout.textContent = buttons[index].getAttribute("aria-label");
    }
    cells.addEventListener("keydown", (event) => {
      const wide = getComputedStyle(cells).gridAutoFlow.startsWith("column");
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!step) return;
      event.preventDefault();
      const [down, right] = step;
      const layer = Math.floor(focused / about.heads) + (wide ? right : down);
      const head = (focused % about.heads) + (wide ? down : right);
      if (layer >= 0 && layer < about.layers && head >= 0 && head < about.heads) buttons[layer * about.heads + head].focus();
    });
    const chosen = h("p", { class: "chosen" });
    const how = h("div", { class: "tabs", role: "group", "aria-label": "Change of the chosen heads" },
      ...Object.entries(CHANGES).map(([change, label]) => h("button", { type: "button", "data-change": change,
        onclick: () => pick({ change }) }, label)));
    const result = h("p", { class: "result", "aria-live": "polite" });
    const band = h("div", { class: "band" }), key = h("p", { class: "note" });
    const attention = h("div", { class: "attention" });

    root.append(
      h("header", {}, h("b", {}, `Live view of ${about.model}`), progress, status),
      h("div", { class: "columns" },
        h("div", {},
          h("h4", {}, "Demonstrations"), ways, rows,
          h("p", { class: "tools" }, h("button", { type: "button", onclick: add }, "Add"),
            h("button", { type: "button", onclick: exchange }, "Exchange labels")), totals,
          h("h4", {}, "Query"), h("p", { class: "query" }, query, h("label", {}, "answer ", answer)),
          h("h4", {}, "Answer"), outcome, next, h("p", { class: "tools" }, pin, copy), box),
        h("div", {},
          h("h4", {}, "Heads"), tabs, meaning, h("p", { class: "note axes" }), h("div", { class: "scroll" }, cells), readout,
          h("h4", {}, "Chosen heads"), chosen, how, result, band, key, attention)));

    // ---- Drawing ----
    const put = (input, value) => { if (input.value !== value) input.value = value; };
    const palette = new Map(); // a label keeps its color while others are typed
    const color = (label) => {
      if (!label.trim()) return "";
      if (!palette.has(label)) palette.set(label, palette.size % 6);
      return `l${palette.get(label)}`;
    };

    function drawPrompt() {
      const list = shown(), effects = panel("demonstrations");
      for (const label of labels()) color(label); // in the order of the static version
      while (rows.children.length > list.length) rows.lastElementChild.remove();
      while (rows.children.length < list.length) rows.append(row(rows.children.length));
      const lost = effects && effects.effects ? effects.effects : null;
      const reach = lost ? Math.max(...lost.flat().map(Math.abs), 1e-9) : 1;
      list.forEach(([text, label], index) => {
        const { fields } = rows.children[index];
        put(fields.text, text);
        put(fields.label, label);
        fields.label.className = `label ${color(label)}`;
        for (const effect of fields.effects) {
          const way = lost ? effects.ways.indexOf(effect.dataset.way) : -1, value = way < 0 ? null : lost[index][way];
          effect.textContent = value === null ? "–" : signed(value);
          effect.setAttribute("aria-label", `${effect.dataset.way} ${effect.textContent}`);
          effect.style.setProperty("--v", value === null ? "0%" : `${(100 * Math.abs(value)) / reach}%`);
          effect.classList.toggle("n", value !== null && value < 0);
        }
      });
      totals.textContent = lost
        ? `What the answer’s log-odds lose, nats. Hidden: the last token does not see the demonstration. Keys: its attention goes to others, its values are read. Values: they are left out. With all demonstrations hidden, the log-odds are ${signed(effects.without_all)}.` +
          ` ${effects.note}`
        : effects && effects.left_out ? effects.left_out : "";
      put(query, state().query);
      const choices = ["", ...labels()];
      if (choices.join("\n") !== [...answer.options].map((one) => one.value).join("\n"))
        answer.replaceChildren(...choices.map((label) => h("option", { value: label }, label || "as predicted")));
      put(answer, state().answer || "");
    }

    function drawAnswer() {
      const found = panel("answer"), change = panel("change"), pins = model.get("_pins");
      const names = found ? found.labels : labels(), after = change && change.probs ? change : null;
      const columns = [["now", found, found && found.probs, found && found.outcome]];
      if (state().heads.length) columns.push(["changed", after && found, after && after.probs, after && after.after]);
      for (const one of pins) {
        columns.push([one.name, one.answer, one.answer.probs, one.answer.outcome, one]);
        if (one.change) columns.push([`${one.name} changed`, one.answer, one.change.probs, one.change.after]);
      }
      const of = (column, label) => {
        const [, where, probs, , pinned] = column, own = where && where.labels ? where.labels : found ? found.labels : [];
        const index = own.indexOf(label);
        return probs && index >= 0 && (!where || !where.choices || where.choices[index]) ? probs[index] : null;
      };
      const all = [...new Set([...names, ...pins.flatMap((one) => one.answer.labels)])];
      const number = (value, text) => h("td", { class: "n" }, value === null ? "–" : text(value));
      const whole = found && Object.keys(found.whole_probs).length ? found.whole_probs : null;
      const target = found ? found.labels[found.target] : "";
      const ofTarget = (where) => (where && where.labels[where.target] !== target ? ` (${where.labels[where.target]})` : "");
      const what = found ? `${found.has_others ? "log-odds" : "log p"} of ${found.labels[found.target]}` : "log-odds";
      outcome.replaceChildren(h("table", {},
        h("thead", {}, h("tr", {}, h("th", {}, "label"), whole ? h("th", { class: "n" }, "whole label") : null, ...columns.map(([title, , , , pinned]) =>
          h("th", { class: "n", scope: "col", title: pinned ? describe(pinned) : null }, title, pinned
            ? h("span", { class: "tools" },
                h("button", { type: "button", title: "Return to this state, with its heads and map", "aria-label": `Return to ${title}`,
                  onclick: () => edit(pinned.state) }, "↩"),
                h("button", { type: "button", title: "Remove the pin", "aria-label": `Remove pin ${title}`,
                  onclick: () => { model.set("_pins", model.get("_pins").filter((one) => one !== pinned)); model.save_changes(); } }, "×"))
            : null)))),
        h("tbody", {}, ...all.map((label) => h("tr", {},
          h("th", { scope: "row" }, h("span", { class: `chip ${color(label)}` }, label)),
          whole ? number(whole[label] ?? null, percent) : null,
          ...columns.map((column) => {
            const value = of(column, label);
            const cell = number(value, percent);
            if (value !== null) { cell.className = "n bar"; cell.style.setProperty("--v", `${100 * value}%`); }
            return cell;
          }))),
          h("tr", { class: "outcome" }, h("th", { scope: "row" }, what), whole ? h("td", {}) : null,
            ...columns.map(([, where, , value]) => number(value ?? null, (x) => `${signed(x)} nats${ofTarget(where)}`))))));
      next.textContent = found
        ? (found.appended ? `The labels begin alike: all numbers are those after ${found.appended}. ` : "") +
          (whole ? "Labels of several tokens are scored by one; “whole label” has all their tokens. " : "") + `Most probable tokens: ${found.tokens.map((token, i) => `${visible(token)} ${percent(found.token_probs[i])}`).join(", ")}. ${found.n_tokens} tokens.`
        : "";
      pin.disabled = !found;
      const python = panel("code");
      copy.disabled = !python;
      code.textContent = python ? python.python : "";
    }

    const describe = ({ state: one }) => `query ${one.query}; ${one.demonstrations.map((pair) => pair.join(" : ")).join(" ")}` +
      (one.heads.length ? `; ${one.heads.join(", ")} ${CHANGES[one.change]}` : "");

    function drawHeads() {
      const { by, heads } = state();
      for (const button of tabs.querySelectorAll("button")) button.setAttribute("aria-pressed", String(!ofAtlas && button.dataset.by === by));
      atlas.value = ofAtlas ? ofAtlas.name : "";
      for (const button of how.children) button.setAttribute("aria-pressed", String(button.dataset.change === state().change));
      const found = panel(by === "contrast" || by === "increase" ? "heads" : by);
      const values = ofAtlas ? ofAtlas.values : found && found[by] ? found[by].flat() : null;
      const top = new Set(ofAtlas ? ofAtlas.outlined : values ? found[`${by}_located`] : []);
      const reach = values ? Math.max(...values.map((value) => Math.abs(value ?? 0)), 1e-9) : 1;
      const title = ofAtlas ? ofAtlas.title : MAPS[by];
      const written = (index) => (ofAtlas ? `${ofAtlas.texts[index]} ${ofAtlas.unit}`.trim() : `${signed(values[index], 3)} nats`);
      const outlined = ofAtlas && ofAtlas.kind ? `of the kind ${ofAtlas.kind}` : `one of the ${top.size} highest`;
      const missing = found && found.left_out ? found.left_out
        : by === "contrast" && panel("heads") && !found[by] ? "There is no other label to compare the answer with." : "";
      meaning.textContent = ofAtlas ? `${ofAtlas.meaning} From the atlas, not from this prompt. ` +
        `Blue is above zero, full color ${Number(reach.toPrecision(3))}${ofAtlas.unit ? ` ${ofAtlas.unit}` : ""}; outlined: ` +
        (ofAtlas.kind ? `the ${top.size} of the kind “${ofAtlas.kind}”.` : `the ${top.size} highest.`) : missing || MEANING[by] + (by === "exchange" && values ? ` Other query: ${found.other_query}.` : "") +
        (values ? ` Blue is above zero, full color ${reach.toFixed(2)} nats; outlined: the ${top.size} highest.` : "");
      buttons.forEach((button, index) => {
        const value = values ? values[index] : null;
        button.style.setProperty("--v", value === null ? "0%" : `${(100 * Math.abs(value)) / reach}%`);
        button.classList.toggle("n", value !== null && value < 0);
        button.classList.toggle("top", top.has(name(index)));
        button.setAttribute("aria-pressed", String(heads.includes(name(index))));
        button.setAttribute("aria-label",
          name(index) + (value === null ? "" : `, ${title} ${written(index)}`) + (top.has(name(index)) ? `, ${outlined}` : ""));
      });
      if (pointed !== null) tell(pointed);
    }

    function drawChange() {
      const { heads, change } = state(), found = panel("change"), answered = panel("answer");
      chosen.replaceChildren(...(heads.length
        ? heads.map((head) => h("button", { type: "button", "aria-label": `Release ${head}`, title: "Release",
            onclick: () => pick({ heads: heads.filter((one) => one !== head) }) }, `${head} ×`))
        : ["Click heads in the map."]));
      if (heads.length > 1) chosen.append(h("button", { type: "button", onclick: () => pick({ heads: [] }) }, "Release all"));
      how.hidden = !heads.length;
      band.replaceChildren();
      result.textContent = key.textContent = "";
      if (!heads.length) return;
      if (!found) { result.textContent = "…"; return; }
      if (found.left_out) { result.textContent = found.left_out; return; }
      const what = answered && !answered.has_others ? "log p" : "log-odds";
      const low = Math.min(...found.draws), high = Math.max(...found.draws);
      const target = answered ? answered.labels[answered.target] : "the answer";
      const verdict = found.after < low ? "below" : found.after > high ? "above" : "within";
      const are = heads.length > 1 ? "the chosen heads are" : `${heads[0]} is`;
      result.textContent = `${what} of ${target}: ${signed(found.before)} → ${signed(found.after)} nats. With ${found.controls} changed alike: ${signed(low)} to ${signed(high)}; ${are} ${verdict} this band.` +
        (found.labels_total < 0.05 ? ` All labels together have only ${percent(found.labels_total)} now: the model is broken rather than changed.` : "");
      if (found.source) result.append(h("span", { class: "note" }, ` ${SOURCES[change]}: ${found.source}`));
      const all = [found.before, found.after, ...found.draws];
      const from = Math.min(...all), to = Math.max(...all), span = to - from || 1;
      const x = (value) => `${3 + (94 * (value - from)) / span}%`;
      const mark = (kind, value, title) => h("i", { class: kind, title: `${title} ${signed(value)}`, style: { left: x(value) } });
      band.append(h("i", { class: "range", style: { left: x(low), right: `${100 - parseFloat(x(high))}%` } }),
        ...found.draws.map((value) => mark("draw", value, "random set")), mark("was", found.before, "before"),
        mark("now", found.after, "chosen heads"));
      band.setAttribute("role", "img");
      band.setAttribute("aria-label", result.textContent);
      key.textContent = `○ before, ● chosen heads, | random sets. Heads that are chosen for a large number are outside the band more often than others.`;
    }

    function drawAttention() {
      const found = panel("attention");
      attention.replaceChildren();
      const { heads } = state();
      if (!heads.length || !found) return;
      if (found.left_out) { attention.append(h("p", { class: "note" }, found.left_out)); return; }
      const list = shown();
      const table = h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "attention to label"),
        ...found.heads.map((head) => h("th", { class: "n", scope: "col" }, h("button", { type: "button", title: "Explain below",
          "aria-pressed": String(head === found.head), onclick: () => pick({ heads: [...heads.filter((one) => one !== head), head] }) }, head))))),
        h("tbody", {}, ...list.map(([text, label], index) => h("tr", {},
          h("th", { scope: "row", title: text }, h("span", { class: "cut" }, text), " ", h("span", { class: `chip ${color(label)}` }, label)),
          ...found.to_labels.map((weights) => {
            const value = weights[index] ?? 0;
            return h("td", { class: "n bar", style: { "--v": `${100 * value}%` } }, value.toFixed(3));
          })))));
      const label = new Map();
      for (const [start, end, one] of found.label_ranges) for (let at = start; at < end; at++) label.set(at, one);
      const names = panel("answer") ? panel("answer").labels : [];
      const reach = Math.max(...found.weights, 1e-9);
      const strip = h("p", { class: "strip", "aria-label": `Attention of ${found.head} by token` },
        ...found.tokens.map((token, at) => h("span", { class: label.has(at) ? color(names[label.get(at)] || "") : "",
          title: `${found.weights[at].toFixed(3)} at position ${at}`, style: { "--v": `${(100 * found.weights[at]) / reach}%` } }, visible(token))));
      attention.append(h("h4", {}, "Attention from the last token"), h("div", { class: "scroll", tabindex: 0, role: "region",
        "aria-label": "Attention to labels" }, table), h("h4", {}, `${found.head} by token`), strip);
      const why = found.why;
      if (why.left_out) { attention.append(h("p", { class: "note" }, why.left_out)); return; }
      const target = panel("answer");
      const writers = (title, side) => h("tr", {}, h("th", { scope: "row" }, title),
        h("td", {}, side.map(([writer, value]) => `${writer} ${signed(value)}`).join(", ")));
      const ffn = /\bF(\d+)\b/.exec([why.because, ...[...why.query, ...why.key].map(([writer]) => writer)].join(" "));
      const total = found.to_labels[found.heads.indexOf(found.head)].reduce((sum, weight) => sum + weight, 0);
      const faint = total < 0.05 ? ` All labels together get only ${percent(total)} of its attention, so this changes little.` : "";
      const more = target ? `${target.labels[target.target]}’s labels` : "the answer’s labels";
      attention.append(h("h4", {}, `Why ${found.head} scores ${more} ${why.difference < 0 ? "lower" : "higher"} than other labels`),
        h("p", {}, `Mean attention score (before the softmax) at ${more} minus at others ${signed(why.difference)}: ` +
          `${why.because}.${ffn ? ` ${ffn[0]} is FFN ${ffn[1]}.` : ""}${faint}`),
        h("table", { class: "writers" }, h("tbody", {}, writers("at the last token", why.query), writers("at the labels", why.key))));
    }

    function drawStatus() {
      const found = panel("status");
      const total = 4 + 2 * Number(state().heads.length > 0) + Number(state().by === "exchange");
      const done = found ? found.done : 0;
      progress.max = total;
      progress.value = done;
      progress.hidden = Boolean(found && (found.error || !found.next));
      root.setAttribute("aria-busy", String(!found || Boolean(found.next && !found.error)));
      status.classList.toggle("error", Boolean(found && found.error));
      const silent = !found && asked && Date.now() - asked > PATIENCE;
      status.textContent = found ? (found.error || (found.next ? `computing ${found.next}…` : "all computed"))
        : silent ? "the kernel does not answer; it may be busy, or gone: run the cell again" : "waiting for the kernel…";
      root.dataset.done = found && !found.next ? look().pick : "";
    }

    // What waits for new numbers keeps its height, so that nothing below moves while one types.
    const waiting = [totals, outcome, next, code, meaning, result, key, attention];
    function draw() {
      const now = panel("status"), busy = !now || Boolean(now.next && !now.error);
      const heights = waiting.map((element) => (busy ? `${element.getBoundingClientRect().height}px` : ""));
      waiting.forEach((element, index) => { element.style.minHeight = heights[index]; });
      drawPrompt();
      drawAnswer();
      drawHeads();
      drawChange();
      drawAttention();
      drawStatus();
    }

    const events = ["look", "status", "pins", ...about.panels].map((one) => `change:_${one}`);
    // Jupyter's keys for cells, such as Enter and arrows, do not act on keys pressed in the view; Ctrl+S and others do.
    const keys = (event) => {
      if (root.contains(event.target)) event.target.toggleAttribute("data-lm-suppress-shortcuts", !(event.ctrlKey || event.metaKey));
    };
    window.addEventListener("keydown", keys, true);
    for (const event of events) model.on(event, draw);
    draw();
    return () => {
      for (const event of events) model.off(event, draw);
      clearTimeout(silence);
      window.removeEventListener("keydown", keys, true);
      stopTheme();
      hide.remove();
    };
  },
};
