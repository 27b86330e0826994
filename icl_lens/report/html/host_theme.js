/** Return "dark" or "light", as the notebook or site with this body says it is; null if it says nothing. */
function hostTheme(body) {
  const { dataset, classList } = body, page = body.ownerDocument.documentElement;
  if (dataset.jpThemeLight) return dataset.jpThemeLight === "false" ? "dark" : "light";  // JupyterLab, Notebook 7
  if (classList.contains("vscode-dark") || dataset.vscodeThemeKind === "vscode-high-contrast") return "dark";
  if (classList.contains("vscode-light") || classList.contains("vscode-high-contrast-light")) return "light";
  if (classList.contains("dark-theme")) return "dark";  // marimo
  if (classList.contains("light-theme")) return "light";
  const named = dataset.theme || page.dataset.theme || page.getAttribute("theme");
  return named === "dark" || named === "light" ? named : null;  // a documentation's own switch, Colab
}
