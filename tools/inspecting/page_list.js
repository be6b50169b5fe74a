"use strict";
// The list of trees: a filter over it, and only the rows in view are in the document.
const ROW = 68, SPARE = 5;
const listed = data.trees.filter(one => one.listed);
let shown = listed, wanted = "";
for (const one of data.trees) {
  one.version = one.admitted_at_version;
  one.words = `tree ${one.tree} ${one.question} version ${one.version} ${one.said} ${one.task}`.toLowerCase();
}

const holds = node => wanted !== "" && (node.lower ??= node.text.toLowerCase()).includes(wanted);

function filter() { // a tree is listed if it has every word, or a node whose text holds them all as they stand
  wanted = at("search").value.trim().toLowerCase();
  const words = wanted.split(/\s+/);
  shown = wanted ? listed.filter(one => words.every(word => one.words.includes(word)) || one.nodes.some(holds)) : listed;
  at("list").scrollTop = 0;
  rows();
  highlight();
}

function rows() {
  const list = at("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - SPARE), last = Math.ceil((list.scrollTop + list.clientHeight) / ROW) + SPARE;
  at("rows").style.height = shown.length * ROW + "px";
  at("rows").replaceChildren(...shown.slice(first, last).map((one, i) => row(one, first + i)));
  list.setAttribute("aria-activedescendant", shown.includes(tree) ? `row-${tree.tree}` : "");
}

function row(one, place) {
  const box = element("div", undefined, { className: "row", id: `row-${one.tree}`, title: one.question });
  for (const [name, is] of [["role", "option"], ["aria-setsize", shown.length], ["aria-posinset", place + 1], ["aria-selected", one === tree]]) box.setAttribute(name, is);
  box.dataset.tree = one.tree;
  box.style.top = place * ROW + "px";
  box.append(element("span", one.question), element("small", [`tree ${one.tree}`, `version ${one.version}`, ...marksOf(one), one.said].join(" · ")));
  return box;
}

function toRow() { // scroll as little as brings the current tree's row into view
  const list = at("list"), top = shown.indexOf(tree) * ROW;
  if (top >= 0) list.scrollTop = Math.max(Math.min(list.scrollTop, top), top + ROW - list.clientHeight);
  rows();
}

function neighbour(by) {
  const next = shown[shown.indexOf(tree) + by];
  if (next) show(next.tree);
}

function nextMatch() { // of the current tree, else the first tree that is listed
  if (!shown.includes(tree) && shown.length) show(shown[0].tree);
  const ids = [...found];
  if (ids.length) reveal(ids.find(id => id > selected) ?? ids[0], false);
  go("tree");
}

const IN_LIST = {
  ArrowDown: () => neighbour(1), ArrowUp: () => neighbour(-1), Home: () => shown.length && show(shown[0].tree), End: () => shown.length && show(shown[shown.length - 1].tree),
  Enter: () => { go("tree"); select(selected); },
};

at("list").addEventListener("scroll", () => requestAnimationFrame(rows));
at("list").addEventListener("click", event => {
  const box = event.target.closest(".row");
  if (box) { show(+box.dataset.tree); go("tree"); }
});
at("search").addEventListener("input", filter);
