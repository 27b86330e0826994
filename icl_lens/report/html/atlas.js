"use strict";
(() => {
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const svg = (tag, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const number = (value) => {
    if (value === null) return "–";
    const text = Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(3);
    return text.replace("-", "−");
  };

  for (const root of document.querySelectorAll(".atlas")) {
    const data = JSON.parse(root.querySelector("script.data").textContent);
    const { n_layers: layers, n_heads: heads, scores, kinds, notes } = data;
    const n = layers * heads;
    const name = (index) => `L${Math.floor(index / heads)}H${index % heads}`;
    const title = (score) => score.title + (score.unit ? `, ${score.unit}` : "");
    let marked = data.marked;

    for (const score of scores) {
      score.center = score.unit === "AUROC" ? .5 : 0; // chance
      score.reach = Math.max(...score.values.map((value) => Math.abs((value ?? score.center) - score.center))) || 1;
      const order = [...score.values.keys()].sort((a, b) => (score.values[b] ?? -Infinity) - (score.values[a] ?? -Infinity));
      score.rank = new Array(n);
      order.forEach((index, place) => { // equal values share the first place; null is no number
        const value = score.values[index] ?? null, before = order[place - 1];
        const isTied = place > 0 && value === score.values[before];
        score.rank[index] = value === null ? null : isTied ? score.rank[before] : place + 1;
      });
      const figure = make("figure");
      const caption = make("figcaption", "", score.title);
      caption.append(make("small", "", score.unit || "\u00a0"));
      caption.title = score.definition;
      const canvas = make("canvas");
      canvas.tabIndex = 0;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${title(score)} of every head; arrow keys move the mark`);
      score.canvas = canvas;
      score.value = make("p", "value");
      figure.append(caption, canvas, score.value);
      root.querySelector(".maps").append(figure);
      const at = (event) => {
        const box = canvas.getBoundingClientRect();
        const head = Math.floor((event.clientX - box.left) / box.width * heads);
        const layer = Math.floor((event.clientY - box.top) / box.height * layers);
        return Math.min(layers - 1, Math.max(0, layer)) * heads + Math.min(heads - 1, Math.max(0, head));
      };
      canvas.addEventListener("click", (event) => mark(at(event)));
      canvas.addEventListener("mousemove", (event) => {
        const index = at(event);
        score.value.textContent = `${name(index)} ${number(score.values[index])}`;
      });
      canvas.addEventListener("mouseleave", () => { score.value.textContent = `${name(marked)} ${number(score.values[marked])}`; });
      canvas.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -heads, ArrowDown: heads }[event.key];
        if (!step || marked + step < 0 || marked + step >= n) return;
        event.preventDefault();
        mark(marked + step);
      });
    }

    const draw = (score) => {
      const canvas = score.canvas;
      const width = canvas.clientWidth;
      if (!width) return;
      const size = width / heads;
      const height = Math.max(Math.min(size, 12), 4) * layers;
      const scale = devicePixelRatio || 1;
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      const style = getComputedStyle(document.documentElement);
      const context = canvas.getContext("2d");
      context.scale(scale, scale);
      const tall = height / layers;
      score.values.forEach((value, index) => {
        const x = index % heads * size;
        const y = Math.floor(index / heads) * tall;
        context.globalAlpha = value === null ? .3 : Math.abs(value - score.center) / score.reach;
        context.fillStyle = style.getPropertyValue(value === null ? "--rule" : value < score.center ? "--neg" : "--pos");
        context.fillRect(x, y, size + .5, tall + .5);
      });
      context.globalAlpha = 1;
      context.lineWidth = 2;
      context.strokeStyle = style.getPropertyValue("--ink");
      context.strokeRect(marked % heads * size - 1, Math.floor(marked / heads) * tall - 1, size + 2, tall + 2);
    };

    const card = () => {
      const place = root.querySelector(".card");
      const kindsOfHead = kinds[marked] ?? [];
      const table = make("table");
      for (const score of scores) {
        const row = make("tr");
        row.append(make("td", "", score.title), make("td", "", number(score.values[marked])), make("td", "", score.rank[marked] === null ? "–" : `${score.rank[marked]} of ${n}`));
        table.append(row);
      }
      const texts = [...(notes[marked] ?? [])];
      if (texts.some((text) => text.includes(" q = "))) texts.push(data.q_value);
      const sentences = texts.map((text) => make("p", "note", text));
      place.replaceChildren(make("h3", "", name(marked)), make("p", "", kindsOfHead.length ? kindsOfHead.join(", ") : "no kind"), ...sentences, table);
    };

    const selects = [root.querySelector("select.x"), root.querySelector("select.y")];
    selects.forEach((select, axis) => {
      for (const score of scores) {
        const option = make("option", "", title(score));
        option.value = score.name;
        option.selected = score.name === data.axes[axis];
        select.append(option);
      }
      select.addEventListener("change", () => scatter());
    });

    const scatter = () => {
      const [x, y] = selects.map((select) => scores.find((score) => score.name === select.value));
      const picture = root.querySelector(".scatter svg");
      const ends = (score) => {
        const finite = score.values.filter((value) => value !== null);
        const [low, high] = [Math.min(0, ...finite), Math.max(0, ...finite)];
        return high > low ? [low, high] : [low - 1, high + 1];
      };
      const [left, right, top, bottom] = [52, 410, 10, 300];
      const [[x0, x1], [y0, y1]] = [ends(x), ends(y)];
      const across = (value) => left + (value - x0) / (x1 - x0) * (right - left);
      const up = (value) => bottom - (value - y0) / (y1 - y0) * (bottom - top);
      picture.replaceChildren(
        svg("line", { x1: left, x2: right, y1: up(0), y2: up(0) }), svg("line", { x1: across(0), x2: across(0), y1: top, y2: bottom }),
        svg("text", { x: left, y: bottom + 16 }, number(x0)), svg("text", { x: right, y: bottom + 16, "text-anchor": "end" }, number(x1)),
        svg("text", { x: left - 6, y: bottom, "text-anchor": "end" }, number(y0)), svg("text", { x: left - 6, y: top + 10, "text-anchor": "end" }, number(y1)),
        svg("text", { x: (left + right) / 2, y: bottom + 32, "text-anchor": "middle" }, title(x)),
        svg("text", { x: 14, y: (top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(top + bottom) / 2})` }, title(y)),
      );
      const order = [...Array(n).keys()].sort((a, b) => (a === marked) - (b === marked) || (a in kinds) - (b in kinds));
      for (const index of order) {
        if (x.values[index] === null || y.values[index] === null) continue;
        const point = svg("circle", { cx: across(x.values[index]), cy: up(y.values[index]), r: index === marked ? 6 : 4 });
        if (index in kinds) point.classList.add("has-kind");
        if (index === marked) point.classList.add("marked");
        point.append(svg("title", {}, `${name(index)}: ${number(x.values[index])}, ${number(y.values[index])}${index in kinds ? `; ${kinds[index].join(", ")}` : ""}`));
        point.addEventListener("click", () => mark(index));
        picture.append(point);
      }
    };

    const show = () => {
      for (const score of scores) {
        draw(score);
        score.value.textContent = `${name(marked)} ${number(score.values[marked])}`;
      }
      card();
      scatter();
    };
    const mark = (index) => { marked = index; root.dataset.marked = name(index); show(); };
    mark(marked);

    // Names of heads in the page's tables mark the head and lead to its card.
    const link = (cell) => {
      const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
      const texts = [];
      while (walker.nextNode()) texts.push(walker.currentNode);
      for (const text of texts) {
        const pieces = text.data.split(/(L\d+H\d+)/);
        if (pieces.length < 2) continue;
        const line = make("span"); // a narrow page lays out a cell's children side by side
        line.append(...pieces.map((piece, place) => {
          const [layer, head] = (piece.match(/\d+/g) ?? []).map(Number);
          if (place % 2 === 0 || layer >= layers || head >= heads) return piece;
          const button = make("button", "head", piece);
          button.type = "button";
          button.addEventListener("click", () => {
            mark(layer * heads + head);
            root.querySelector(".card").scrollIntoView();
          });
          return button;
        }));
        text.replaceWith(line);
      }
    };
    addEventListener("DOMContentLoaded", () => { // the tables come after this script
      document.querySelectorAll("td").forEach((cell) => { if (!root.contains(cell)) link(cell); });
    });
    addEventListener("resize", () => scores.forEach(draw));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTimeout(() => scores.forEach(draw), 50));
  }
})();
