"use strict";
// The page of coppice trees --html: the prefix tree. Texts of rollouts enter the document as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);
const WIDTH = 250, HEIGHT = 66, ACROSS = 290, DOWN = 76, EDGE = 12, FADED = 0.7, SMALLEST = 0.2;
let tree, below, folded, order, selected = 0, zoom = 1, found = new Set(), trunkOnly = false, byId, range;
const places = new Map(), boxes = new Map();

const element = (name, text, fields) => Object.assign(document.createElement(name), text === undefined ? {} : { textContent: text }, fields);
const number = value => value === null || value === undefined ? "–" : Math.abs(value) >= 1000 ? value.toFixed(0) : +value.toFixed(3) + "";

// ------------------------------------------------------------------------------------------------ values and colours

const sum = values => values ? values.reduce((a, b) => a + b, 0) : undefined;
const span = node => node.versions && node.versions.length ? [Math.min(...node.versions), Math.max(...node.versions)] : undefined;
const gap = node => node.newest ? sum(node.newest) - sum(node.logprobs) : undefined;
const BUILT_IN = { "log-probability": node => sum(node.logprobs), "change of log-probability": gap, version: node => span(node) && span(node)[1], tokens: node => node.tokens.length };
const valueOf = (node, name) => name in BUILT_IN ? BUILT_IN[name](node) : node.scores[name];

function scale(name) { // the range over all trees of the page, so that equal colours mean equal values
  const values = data.trees.flatMap(one => one.nodes).filter(node => node.kind === "action").map(node => valueOf(node, name)).filter(value => value !== undefined && value !== null);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return { name, low, high, most: Math.max(Math.abs(low), Math.abs(high)) };
}

function tint(value, { low, high, most }) { // two colours around zero where values have both signs, one where they have not
  if (value === undefined || value === null || !(high > low)) return "";
  const share = low < 0 && high > 0 ? value / most : (value - low) / (high - low);
  return `rgba(var(--${share < 0 ? "low" : "high"}), ${(FADED * Math.abs(share)).toFixed(3)})`;
}

const colours = () => scale(at("colour").value);

// ------------------------------------------------------------------------------------------------ the tree

function show(number, node) { // the tree, and in it the node, or where the tree begins, or where it is most surprising
  tree = data.trees.find(one => one.tree === number) || shown[0] || data.trees[0];
  byId = new Map(tree.nodes.map(one => [one.id, one]));
  below = new Map(tree.nodes.map(one => [one.id, []]));
  for (const one of tree.nodes) if (below.has(one.parent)) below.get(one.parent).push(one);
  folded = new Set();
  selected = below.has(node) ? node : tree.nodes.length ? surprising().id : -1;
  at("tree").setAttribute("aria-label", `Prefix tree ${tree.tree}: ${tree.question}`);
  if (trunkOnly && byId.has(selected) && !byId.get(selected).chosen) hideOthers(false);
  draw();
  about();
  toRow();
  highlight();
  at("view").scrollTo(0, 0);
  if (byId.has(selected)) into(byId.get(selected));
  select(selected, false);
}

function surprising() {
  const size = node => data.surprising && node.kind === "action" ? Math.abs(node.scores[data.surprising] ?? 0) : 0;
  return tree.nodes.reduce((most, node) => size(node) > size(most) ? node : most, tree.nodes[0]);
}

const inside = node => folded.has(node.id) ? [] : below.get(node.id).filter(child => !trunkOnly || child.chosen).sort((a, b) => b.chosen - a.chosen);

function lay() { // a node takes the next free row of its column from its parent's row on; the continued child comes first, so the trunk is straight
  order = [];
  places.clear();
  const free = [], waiting = tree.nodes.filter(node => node.parent < 0).map(node => [node, 0]);
  while (waiting.length) {
    const [node, depth] = waiting.pop(), above = places.get(node.parent), row = Math.max(above ? above[1] : 0, free[depth] || 0);
    order.push([node, depth]);
    places.set(node.id, [depth, row]);
    free[depth] = row + 1;
    for (const child of inside(node).reverse()) waiting.push([child, depth + 1]);
  }
}

const left = node => places.get(node.id)[0] * ACROSS + EDGE, rise = node => places.get(node.id)[1] * DOWN + EDGE;

function draw() {
  lay();
  const lines = ["", ""], edges = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  let right = 0, bottom = 0;
  for (const [node] of order) {
    const x = left(node), y = rise(node), above = places.has(node.parent) && byId.get(node.parent);
    [right, bottom] = [Math.max(right, x + WIDTH), Math.max(bottom, y + HEIGHT)];
    if (above) {
      const x0 = left(above) + WIDTH, y0 = rise(above) + HEIGHT / 2, y1 = y + HEIGHT / 2;
      lines[+node.chosen] += `M${x0} ${y0}C${x0 + 20} ${y0} ${x - 20} ${y1} ${x} ${y1}`;
    }
  }
  for (const [name, value] of [["id", "edges"], ["aria-hidden", true], ["width", right + EDGE], ["height", bottom + EDGE]]) edges.setAttribute(name, value);
  for (const [line, name] of [[lines[0], ""], [lines[1], "trunk"]]) {
    const path = document.createElementNS(edges.namespaceURI, "path");
    path.setAttribute("d", line);
    path.setAttribute("class", name);
    edges.append(path);
  }
  boxes.clear();
  range = colours();
  at("tree").replaceChildren(edges);
  at("tree").size = [right + EDGE, bottom + EDGE];
  scaled(zoom);
}

function paint() { // only what is in view, and the selected node, has a box, so that a tree of thousands of nodes is as quick as a small one
  const view = at("view"), margin = 300;
  const [x0, y0] = [view.scrollLeft / zoom - WIDTH - margin, view.scrollTop / zoom - HEIGHT - margin];
  const [x1, y1] = [(view.scrollLeft + view.clientWidth) / zoom + margin, (view.scrollTop + view.clientHeight) / zoom + margin];
  let next = null; // boxes stand in the document in the order of the tree, in which a screen reader reads them
  for (const [node, depth] of order.slice().reverse()) {
    const x = left(node), y = rise(node), seen = node.id === selected || x > x0 && x < x1 && y > y0 && y < y1;
    let box = boxes.get(node.id);
    if (seen && !box) {
      box = card(node, depth);
      Object.assign(box.style, { left: x + "px", top: y + "px" });
      boxes.set(node.id, box);
      at("tree").insertBefore(box, next);
    } else if (!seen && box) {
      box.remove();
      boxes.delete(node.id);
    }
    if (seen) next = box;
  }
}

function card(node, depth) {
  const value = node.kind === "action" ? valueOf(node, range.name) : undefined, hidden = below.get(node.id).length - inside(node).length;
  const words = [node.kind, node.id, node.chosen && node.kind === "action" ? "continued" : "", node.forced ? "forced" : "", node.scores.valid === 0 ? "invalid" : "", markOf(tree, node) ? `${SIGNS[markOf(tree, node).mark]} marked ${markOf(tree, node).mark}` : ""].filter(word => word !== "");
  const said = value === undefined ? "" : ` ${range.name} ${number(value)}`;
  const box = element("div", undefined, { className: `node ${node.kind}${node.chosen ? " chosen" : ""}${found.has(node.id) ? " hit" : ""}`, tabIndex: node.id === selected ? 0 : -1 });
  box.dataset.node = node.id;
  const siblings = below.get(node.parent) || [node];
  for (const [name, is] of [["role", "treeitem"], ["aria-level", depth + 1], ["aria-setsize", siblings.length], ["aria-posinset", siblings.indexOf(node) + 1], ["aria-selected", node.id === selected]]) box.setAttribute(name, is);
  if (below.get(node.id).length) box.setAttribute("aria-expanded", !folded.has(node.id));
  box.style.backgroundImage = tint(value, range) && `linear-gradient(${tint(value, range)}, ${tint(value, range)})`;
  if (below.get(node.id).length) box.append(element("i", hidden ? `+${hidden}` : "−", { ariaHidden: "true" }));
  box.append(element("b", words.join(" ")), said, element("p", node.text.trim().slice(0, 160)));
  return box;
}

function select(id, focus = true) {
  const before = boxes.get(selected), node = byId.get(id);
  if (before) { before.setAttribute("aria-selected", "false"); before.tabIndex = -1; }
  selected = id;
  if (!node) { at("details").replaceChildren(element("h2", "This tree has no node yet.")); return; }
  if (focus) into(node);
  paint();
  boxes.get(id).setAttribute("aria-selected", "true");
  boxes.get(id).tabIndex = 0;
  if (focus) boxes.get(id).focus({ preventScroll: true });
  history.replaceState(null, "", `#${tree.tree}:${id}`);
  describe(node);
}

function repaint(id) { // draw one box anew
  const box = boxes.get(id);
  if (!box) return;
  boxes.delete(id);
  const held = document.activeElement === box;
  box.remove();
  paint();
  if (held) boxes.get(id).focus({ preventScroll: true });
}

function into(node) { // scroll as little as brings a node into view
  const view = at("view"), [x, y] = [left(node) * zoom, rise(node) * zoom];
  view.scrollLeft = Math.max(Math.min(view.scrollLeft, x - EDGE), x + WIDTH * zoom + EDGE - view.clientWidth);
  view.scrollTop = Math.max(Math.min(view.scrollTop, y - EDGE), y + HEIGHT * zoom + EDGE - view.clientHeight);
}

function redraw() {
  draw();
  select(places.has(selected) ? selected : order[0][0].id);
}

function fold(id, closed) {
  folded[closed ? "add" : "delete"](id);
  selected = id;
  redraw();
}

function hideOthers(hide) { // the candidates that were not continued
  trunkOnly = hide;
  at("trunk").setAttribute("aria-pressed", hide);
}

function reveal(id, focus = true) { // open everything above a node
  let changed = trunkOnly && !places.has(id);
  if (changed) hideOthers(false);
  for (let above = byId.get(byId.get(id).parent); above; above = byId.get(above.parent)) changed = folded.delete(above.id) || changed;
  if (changed) draw();
  into(byId.get(id));
  select(id, focus);
}

function highlight() { // the nodes that the filter matches
  found = new Set(tree.nodes.filter(holds).map(node => node.id));
  for (const [id, box] of boxes) box.classList.toggle("hit", found.has(id));
  at("found").textContent = wanted ? `${shown.length} of ${listed.length} trees; ${found.size} nodes here` : `${listed.length} trees`;
}

function scaled(wish) {
  zoom = Math.min(2, Math.max(SMALLEST, wish));
  const [width, height] = at("tree").size;
  at("tree").style.transform = `scale(${zoom})`;
  at("room").style.width = width * zoom + "px";
  at("room").style.height = height * zoom + "px";
  paint();
}

function fit() {
  const [width, height] = at("tree").size;
  scaled(Math.min(1, at("view").clientWidth / width, at("view").clientHeight / height));
}
