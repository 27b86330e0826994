"use strict";
// Light or dark before anything is drawn: as the notebook or site around the frame says, else as the system does.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let host = null;
  try { host = window.frameElement && window.frameElement.ownerDocument; } catch { /* another origin */ }

  const around = () => (host && host.body ? hostTheme(host.body) : null);
  const apply = () => {
    const root = document.documentElement;
    root.dataset.theme = around() || (system.matches ? "dark" : "light");
    root.style.colorScheme = root.dataset.theme;
  };
  apply();
  system.addEventListener("change", apply);
  if (host) {
    const watch = new MutationObserver(apply);
    for (const element of [host.documentElement, host.body]) watch.observe(element, { attributes: true });
  }
})();
