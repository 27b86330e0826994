"use strict";
// Light or dark before anything is drawn: as the notebook or site around the frame says, else as the system does.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let host = null;
  try { host = window.frameElement && window.frameElement.ownerDocument; } catch { /* another origin */ }

  const around = () => {
    if (!host || !host.body) return null;
    const { dataset, classList } = host.body;
    if (dataset.jpThemeLight) return dataset.jpThemeLight === "false" ? "dark" : "light";  // JupyterLab, Notebook 7
    if (classList.contains("vscode-dark") || dataset.vscodeThemeKind === "vscode-high-contrast") return "dark";
    if (classList.contains("vscode-light") || classList.contains("vscode-high-contrast-light")) return "light";
    const named = dataset.theme || host.documentElement.dataset.theme || host.documentElement.getAttribute("theme");
    return named === "dark" || named === "light" ? named : null;  // a documentation's own switch, Colab
  };
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
