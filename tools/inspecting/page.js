"use strict";
// The page of coppice trees --html. Texts of rollouts enter the document as text, never as markup.
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

function show(number, node = 0) {
  tree = data.trees.find(one => one.tree === number) || data.trees[0];
  byId = new Map(tree.nodes.map(one => [one.id, one]));
  below = new Map(tree.nodes.map(one => [one.id, []]));
  for (const one of tree.nodes) if (below.has(one.parent)) below.get(one.parent).push(one);
  folded = new Set();
  for (const button of at("list").children) button.toggleAttribute("aria-current", +button.dataset.tree === tree.tree);
  selected = below.has(node) ? node : tree.nodes.length ? tree.nodes[0].id : -1;
  at("tree").setAttribute("aria-label", `Prefix tree ${tree.tree}, task ${tree.task}`);
  draw();
  search(false);
  select(selected, false);
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
  const words = [node.kind, node.id, node.chosen && node.kind === "action" ? "continued" : "", node.forced ? "forced" : "", node.scores.valid === 0 ? "invalid" : ""].filter(word => word !== "");
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

function reveal(id) { // open everything above a node
  let changed = trunkOnly && !places.has(id);
  if (changed) hideOthers(false);
  for (let above = byId.get(byId.get(id).parent); above; above = byId.get(above.parent)) changed = folded.delete(above.id) || changed;
  if (changed) draw();
  select(id);
}

// ------------------------------------------------------------------------------------------------ one node

function describe(node) {
  const parts = [element("h2", `${node.kind} ${node.id}`), element("p", told(node), { className: "dim" })];
  for (const url of node.pictures || []) parts.push(element("img", undefined, { src: url, alt: "A picture that the policy saw" }));
  parts.push(element("h3", "Text"), marked(node.text));
  const names = Object.keys(node.scores);
  if (names.length) {
    const table = element("table");
    for (const name of names) {
      const row = table.insertRow();
      row.append(element("th", name, { scope: "row" }), element("td", number(node.scores[name])));
    }
    parts.push(element("h3", "Scores"), table);
  }
  for (const [judge, note] of Object.entries(node.notes)) parts.push(element("h3", `Said by ${judge}`), element("pre", note));
  if (node.pieces) parts.push(...heat(node));
  at("details").replaceChildren(...parts);
}

function told(node) {
  const words = [`${node.tokens.length} tokens`];
  if (node.cached_tokens) words.push(`${node.cached_tokens} prompt tokens from the cache`);
  if (node.kind === "action") words.push(node.chosen ? "continued" : "not continued", node.forced ? "forced, not trained" : "");
  if (node.finish && node.finish !== "stop") words.push(`ended by ${node.finish}`);
  if (span(node)) words.push(span(node)[0] === span(node)[1] ? `version ${span(node)[0]}` : `versions ${span(node).join(" to ")}`);
  if (node.invalid.length) words.push(`a judge could not give ${node.invalid.join(", ")}`);
  return words.filter(word => word).join("; ");
}

function marked(text) {
  const box = element("pre"), wanted = at("search").value.toLowerCase(), lower = text.toLowerCase();
  let from = 0;
  for (let place = wanted ? lower.indexOf(wanted) : -1; place >= 0; place = lower.indexOf(wanted, from)) {
    box.append(text.slice(from, place), element("mark", text.slice(place, place + wanted.length)));
    from = place + wanted.length;
  }
  box.append(text.slice(from));
  return box;
}

function heat(node) { // log-probabilities lie below 0, so the least probable token has the strongest colour
  const choice = element("select", undefined, { ariaLabel: "Colour of the tokens" }), box = element("pre"), said = element("p", "", { className: "dim" });
  const kinds = { "when sampled": node.logprobs };
  if (node.newest) Object.assign(kinds, { [`under version ${data.newest}`]: node.newest, change: node.newest.map((value, i) => value - node.logprobs[i]) });
  for (const name of Object.keys(kinds)) choice.append(element("option", name));
  const paint = () => {
    const values = kinds[choice.value], most = Math.max(1e-9, ...values.map(Math.abs)), least = values.indexOf(Math.min(...values));
    box.replaceChildren(...node.pieces.map((piece, i) => {
      const token = element("span", piece, { title: `${number(values[i])}` });
      token.style.backgroundColor = `rgba(var(--${values[i] < 0 ? "low" : "high"}), ${(FADED * Math.abs(values[i]) / most).toFixed(3)})`;
      return token;
    }));
    said.textContent = `sum ${number(sum(values))}; lowest ${number(values[least])} at “${node.pieces[least]}”`;
  };
  choice.addEventListener("change", paint);
  paint();
  return [element("h3", "Log-probability of each token"), choice, said, box];
}

// ------------------------------------------------------------------------------------------------ search, zoom, keys

function search(go) {
  const wanted = at("search").value.toLowerCase(), matches = node => wanted && node.text.toLowerCase().includes(wanted);
  found = new Set(tree.nodes.filter(matches).map(node => node.id));
  for (const button of at("list").children) {
    const count = data.trees.find(one => one.tree === +button.dataset.tree).nodes.filter(matches).length;
    button.lastChild.textContent = wanted ? `${count} found` : button.dataset.said;
  }
  for (const [id, box] of boxes) box.classList.toggle("hit", found.has(id));
  at("found").textContent = wanted ? `${found.size} nodes here` : "";
  const ids = [...found];
  if (go && ids.length) reveal(ids.find(id => id > selected) ?? ids[0]);
}

function scaled(wanted) {
  zoom = Math.min(2, Math.max(SMALLEST, wanted));
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

function step(by) {
  const place = order.findIndex(([node]) => node.id === selected) + by;
  if (order[place]) select(order[place][0].id);
}

const KEYS = {
  ArrowDown: () => step(1), ArrowUp: () => step(-1), Home: () => select(order[0][0].id), End: () => select(order[order.length - 1][0].id),
  ArrowRight: () => folded.has(selected) ? fold(selected, false) : inside(byId.get(selected)).length && select(inside(byId.get(selected))[0].id),
  ArrowLeft: () => inside(byId.get(selected)).length ? fold(selected, true) : byId.has(byId.get(selected).parent) && select(byId.get(selected).parent),
  Enter: () => at("details").focus(), " ": () => fold(selected, !folded.has(selected)),
};
const ANYWHERE = {
  "/": () => at("search").focus(), "+": () => scaled(zoom * 1.25), "-": () => scaled(zoom / 1.25), 0: fit, "[": () => neighbour(-1), "]": () => neighbour(1),
  Escape: () => select(selected),
};

function neighbour(by) {
  const next = data.trees[data.trees.indexOf(tree) + by];
  if (next) { show(next.tree); select(selected); }
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === at("search") && event.key === "Enter") { search(true); at("search").focus(); return; }
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName) && event.key !== "Escape";
  const act = event.target.closest("#tree") && KEYS[event.key] || !typing && ANYWHERE[event.key];
  if (act) { event.preventDefault(); act(); }
});
at("tree").addEventListener("click", event => {
  const box = event.target.closest(".node");
  if (box && event.target.tagName === "I") fold(+box.dataset.node, !folded.has(+box.dataset.node));
  else if (box) select(+box.dataset.node);
});
at("view").addEventListener("scroll", () => requestAnimationFrame(paint));
addEventListener("resize", () => requestAnimationFrame(paint));
at("view").addEventListener("wheel", event => { if (event.ctrlKey) { event.preventDefault(); scaled(zoom * (event.deltaY < 0 ? 1.1 : 1 / 1.1)); } }, { passive: false });
at("view").addEventListener("pointerdown", event => {
  if (event.target.closest(".node") || event.button) return;
  const view = at("view"), from = [view.scrollLeft + event.clientX, view.scrollTop + event.clientY];
  const move = moved => { view.scrollLeft = from[0] - moved.clientX; view.scrollTop = from[1] - moved.clientY; };
  view.classList.add("held");
  document.addEventListener("pointermove", move);
  document.addEventListener("pointerup", () => { document.removeEventListener("pointermove", move); view.classList.remove("held"); }, { once: true });
});
at("search").addEventListener("input", () => { search(false); describe(byId.get(selected)); });
at("colour").addEventListener("change", () => { legend(); draw(); select(selected, false); });
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
  if (names.length) at("colour").value = ["advantage", "reward", "outcome"].find(name => names.includes(name)) || names[0];
  for (const one of data.trees) {
    const button = element("button", `${one.tree}  ${one.task}`), said = `version ${one.admitted_at_version}, ${one.said}`;
    Object.assign(button.dataset, { tree: one.tree, said });
    button.addEventListener("click", () => show(one.tree));
    button.append(element("br"), element("small", said));
    at("list").append(button);
  }
  legend();
  follow();
}

function follow() { // the address may name a tree and a node, as #tree:node; the node is then opened, selected and brought into view
  const [number, node] = location.hash.slice(1).split(":").map(Number), linked = location.hash.length > 1;
  show(linked ? number : data.trees[0].tree, node);
  if (linked && byId.has(selected)) reveal(selected);
}

addEventListener("hashchange", follow);
begin();
