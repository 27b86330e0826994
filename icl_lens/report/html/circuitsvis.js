"use strict";
(() => {
  const places = [...document.querySelectorAll(".cv")];

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // circuitsvis draws into an element it finds by its id; what it draws into must not hold the data it is drawn from.
  const draw = (place, i) => {
    const data = JSON.parse(place.querySelector("script").textContent);
    const inner = document.createElement("div");
    inner.id = `cv-${i}`;
    // As a style sheet: circuitsvis draws its tokens again whenever it likes.
    const token = (position) => `#${inner.id} .colored-tokens > span:nth-of-type(${position + 1})`;
    const rules = data.dim ? [`#${inner.id} .colored-tokens > span { opacity: .5 }`] : [];
    for (const [position, label, share] of data.marks) {
      rules.push(`${token(position)} { opacity: 1; --l: var(--l${label % 6}) }`,
        `${token(position)} > span { background: color-mix(in srgb, var(--l) ${100 * share}%, white) !important; `
          + "color: var(--cv-ink) !important; box-shadow: inset 0 -3px var(--l) }");
    }
    place.append(make("style", "", rules.join("\n")), inner);
    CircuitsVis.render(inner.id, CircuitsVis[place.dataset.component], data.props);
  };

  // circuitsvis comes packed: base64, then gzip.
  const unpack = async (packed) => {
    const bytes = Uint8Array.from(atob(packed.textContent), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = make("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    packed.remove();
  };
  const begin = async () => {
    try {
      await unpack(document.getElementById("circuitsvis"));
      places.forEach(draw);
    } catch (error) {
      for (const place of places) {
        place.classList.add("failed");
        place.append(make("p", "key", `This browser cannot draw these tokens (${error}); use a browser from 2023 or later.`));
      }
    }
    document.documentElement.dataset.ready = "1";
  };
  begin();
})();
