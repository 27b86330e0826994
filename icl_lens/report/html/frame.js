for (const page of document.querySelectorAll(".icl-lens-page[data-page]")) {
  const frame = Object.assign(document.createElement("iframe"), { title: page.title, srcdoc: page.dataset.page });
  frame.style = `width:100%;height:${page.dataset.height}px;border:0;display:block`;
  page.nextElementSibling.hidden = true;
  page.replaceWith(frame);
}
