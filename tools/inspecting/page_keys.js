"use strict";
// Keys, pointer and addresses, and the beginning.
function step(by) {
  const place = order.findIndex(([node]) => node.id === selected) + by;
  if (order[place]) select(order[place][0].id);
}

const KEYS = {
  ArrowDown: () => step(1), ArrowUp: () => step(-1), Home: () => select(order[0][0].id), End: () => select(order[order.length - 1][0].id),
  ArrowRight: () => folded.has(selected) ? fold(selected, false) : inside(byId.get(selected)).length && select(inside(byId.get(selected))[0].id),
  ArrowLeft: () => inside(byId.get(selected)).length ? fold(selected, true) : byId.has(byId.get(selected).parent) && select(byId.get(selected).parent),
  Enter: () => go("details"), " ": () => fold(selected, !folded.has(selected)),
};
const MARKING = { g: () => put("good"), b: () => put("bad"), u: () => put("unsure"), n: () => { if (at("note")) { go("details"); at("note").focus(); } } };
const ANYWHERE = {
  "/": () => { go("list"); at("search").select(); }, "+": () => scaled(zoom * 1.25), "-": () => scaled(zoom / 1.25), 0: fit, "[": () => neighbour(-1), "]": () => neighbour(1),
  ",": () => version(-1), ".": () => version(1), v: compare, s: () => unsaved && save(),
};
const SCREENS = ["list", "tree", "details"], narrow = matchMedia("(max-width: 800px)");

function go(screen) { // where the keyboard is; a narrow window shows only this part
  document.body.dataset.screen = screen;
  if (screen === "list") { toRow(); at("list").focus(); }
  else if (screen === "details") at("details").focus();
  else if (comparing) at("compare").focus();
  else select(selected);
}

function back() {
  if (comparing && document.body.dataset.screen === "tree") compare();
  else go(SCREENS[Math.max(0, SCREENS.indexOf(document.body.dataset.screen) - 1)]);
}

document.addEventListener("focusin", event => {
  const part = event.target.closest("nav") ? "list" : event.target.closest("main") ? "tree" : event.target.closest("aside") ? "details" : undefined;
  if (part && !narrow.matches) document.body.dataset.screen = part;
});
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const part = name => event.target.closest(name), typing = ["INPUT", "SELECT"].includes(event.target.tagName);
  let act;
  if (event.key === "Escape") act = back;
  else if (event.target === at("search")) act = { Enter: nextMatch, ArrowDown: () => go("list") }[event.key];
  else if (!typing) act = part("#tree") && KEYS[event.key] || part("#list") && IN_LIST[event.key] || !part("nav") && MARKING[event.key] || ANYWHERE[event.key];
  if (act) { event.preventDefault(); act(); }
});
at("tree").addEventListener("click", event => {
  const box = event.target.closest(".node");
  if (box && event.target.tagName === "I") fold(+box.dataset.node, !folded.has(+box.dataset.node));
  else if (box) { select(+box.dataset.node); if (narrow.matches) go("details"); }
});
at("view").addEventListener("scroll", () => requestAnimationFrame(paint));
addEventListener("resize", () => requestAnimationFrame(() => { paint(); rows(); }));
at("view").addEventListener("wheel", event => { if (event.ctrlKey) { event.preventDefault(); scaled(zoom * (event.deltaY < 0 ? 1.1 : 1 / 1.1)); } }, { passive: false });
at("view").addEventListener("pointerdown", event => {
  if (event.target.closest(".node") || event.button) return;
  const view = at("view"), from = [view.scrollLeft + event.clientX, view.scrollTop + event.clientY];
  const move = moved => { view.scrollLeft = from[0] - moved.clientX; view.scrollTop = from[1] - moved.clientY; };
  view.classList.add("held");
  document.addEventListener("pointermove", move);
  document.addEventListener("pointerup", () => { document.removeEventListener("pointermove", move); view.classList.remove("held"); }, { once: true });
});
at("search").addEventListener("input", () => byId.has(selected) && describe(byId.get(selected)));
at("colour").addEventListener("change", () => { legend(); draw(); compared(); select(selected, false); });
at("back").addEventListener("click", back);
at("open").addEventListener("click", () => { folded.clear(); hideOthers(false); redraw(); });
at("trunk").addEventListener("click", () => { hideOthers(!trunkOnly); redraw(); });
at("in").addEventListener("click", () => scaled(zoom * 1.25));
at("out").addEventListener("click", () => scaled(zoom / 1.25));
at("fit").addEventListener("click", fit);

function legend() {
  const { low, high } = colours();
  at("scale").textContent = low <= high ? `from ${number(low)} to ${number(high)}` : "";
}

function begin() {
  document.title = at("title").textContent = data.title;
  const actions = data.trees.flatMap(one => one.nodes).filter(node => node.kind === "action");
  const names = [...new Set(actions.flatMap(node => Object.keys(node.scores)))].sort();
  names.push(...Object.keys(BUILT_IN).filter(name => actions.some(node => BUILT_IN[name](node) !== undefined)));
  for (const name of names) at("colour").append(element("option", name));
  data.surprising &&= ["advantage", "reward", "outcome"].find(name => names.includes(name));
  if (names.length) at("colour").value = ["advantage", "reward", "outcome"].find(name => names.includes(name)) || names[0];
  document.body.dataset.screen = location.hash.length > 1 ? "tree" : "list";
  legend();
  follow();
}

function follow() { // the address may name a tree and a node, as #tree:node; the node is then opened, selected and brought into view
  const [number, node] = location.hash.slice(1).split(":").map(Number), linked = location.hash.length > 1;
  show(linked ? number : listed[0].tree, node);
}

addEventListener("hashchange", follow);
begin();
