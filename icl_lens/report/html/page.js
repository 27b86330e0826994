"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
  const weights = (place, data, layer, head) => {
    if (place.childElementCount) return;
    const reach = Math.max(...data.attention[layer][head]) || 1;
    data.demos.forEach((demo, i) => {
      const value = data.attention[layer][head][i];
      const name = make("span");
      name.append(make("span", `tok l${demo.label % 6}`, demo.token), make("small", "", ` at ${demo.position}`));
      const bar = make("span", `bar l${demo.label % 6}`);
      bar.style.setProperty("--v", `${100 * value / reach}%`);
      place.append(name, bar, make("span", "", value.toFixed(3)));
    });
  };

  for (const explorer of all(".explorer")) {
    const data = JSON.parse(explorer.querySelector("script.data").textContent);
    const cells = all(".cells button", explorer);
    const ranked = [...cells].sort((a, b) => b.dataset.value - a.dataset.value);
    const other = explorer.querySelector(".panel.other");

    const show = (name, scroll) => {
      const cell = cells.find((one) => one.dataset.head === name);
      if (!cell) return;
      const [layer, head] = name.slice(1).split("H").map(Number);
      let panel = all(".panel[data-head]", explorer).find((one) => one.dataset.head === name && one !== other);
      if (!panel) {
        panel = other;
        const header = make("header");
        const rank = ranked.indexOf(cell) + 1;
        header.append(make("h3", "", name),
          make("p", "", `rank ${rank} of ${cells.length}: ${data.by} ${signed(Number(cell.dataset.value))} nats`));
        other.replaceChildren(header, make("h4", "", "Attention from the last token"), make("div", "weights"),
          make("p", "key", `Only the ${data.k} heads with the largest ${data.by} are described in full. This head is number ${rank}: `
            + `to include it, recreate the page with --top ${rank} (k=${rank} in Python) or more.`));
        other.dataset.head = name;
        other.setAttribute("aria-label", `Head ${name}`);
      }
      all(".panel", explorer).forEach((one) => { one.hidden = one !== panel; });
      for (const one of cells) one.setAttribute("aria-pressed", String(one === cell));
      all("[data-show]").forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.show === name)));
      weights(panel.querySelector(".weights"), data, layer, head);
      if (scroll && panel.getBoundingClientRect().top > innerHeight - 120) {
        const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
        panel.scrollIntoView({ block: "start", behavior: still ? "auto" : "smooth" });
      }
    };
    cells.forEach((cell) => cell.addEventListener("click", () => show(cell.dataset.head, true)));
    all("[data-show]").forEach((link) => link.addEventListener("click", () => {
      show(link.dataset.show, false);
      const panel = all(".panel", explorer).find((one) => !one.hidden);
      panel.scrollIntoView({ block: "start" });
    }));
    if (explorer.querySelector(".panel[data-head]")) show(data.first, false);
  }

  // One stop for the Tab key a map; the arrow keys move inside it, as the map lies on the screen.
  for (const map of all(".map")) {
    const cells = all(".cells button", map);
    const byName = new Map(cells.map((cell) => [cell.dataset.head, cell]));
    const readout = map.querySelector(".readout");
    const across = () => getComputedStyle(map.querySelector(".cells")).gridAutoFlow.includes("column");
    const read = (cell) => { readout.textContent = `${cell.dataset.head}  ${signed(Number(cell.dataset.value))} ${map.dataset.unit}`; };
    (cells.find((cell) => cell.getAttribute("aria-pressed") === "true") || cells[0]).tabIndex = 0;
    map.addEventListener("pointerover", (event) => event.target.dataset.head && read(event.target));
    map.addEventListener("focusin", (event) => event.target.dataset.head && read(event.target));
    map.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
      if (!step || !event.target.dataset.head) return;
      const [layer, head] = event.target.dataset.head.slice(1).split("H").map(Number);
      const [dl, dh] = across() ? step : [step[1], step[0]];
      const next = byName.get(`L${layer + dl}H${head + dh}`);
      event.preventDefault();
      if (!next) return;
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }

  if (!document.querySelector(".cv")) document.documentElement.dataset.ready = "1";  // else circuitsvis.js, when it has drawn

  // Inside a notebook's frame: as high as the content. Where the frame cannot be reached, it scrolls instead.
  let frame = null;
  try { frame = window.frameElement; } catch { /* another origin */ }
  if (frame) {
    const fit = () => { frame.style.height = `${Math.ceil(document.body.getBoundingClientRect().height) + 8}px`; };
    new ResizeObserver(fit).observe(document.body);
    fit();
  }
})();
