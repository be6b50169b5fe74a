"use strict";
// Time as a picture: the trees of one question, from the first version to the last.
let series = [], comparing = false;
const ofTask = new Map();
for (const one of data.trees) ofTask.set(one.task, [...(ofTask.get(one.task) || []), one]);
for (const trees of ofTask.values()) trees.sort((a, b) => a.version - b.version || a.tree - b.tree);

function about() { // the words above the tree, and the slider
  at("question").textContent = tree.question;
  at("facts").textContent = `tree ${tree.tree} · version ${tree.version} · ${tree.said} · task ${tree.task}${tree.reason ? " · " + tree.reason : ""}`;
  series = ofTask.get(tree.task);
  at("versions").hidden = series.length < 2;
  at("slider").max = series.length - 1;
  at("slider").value = series.indexOf(tree);
  const said = `${tree.version} (${series.indexOf(tree) + 1} of ${series.length})`;
  at("slider").setAttribute("aria-valuetext", `version ${said}`);
  at("version").textContent = said;
  if (series.length < 2) comparing = false;
  compared();
}

function compared() {
  at("compare").setAttribute("aria-pressed", comparing);
  document.body.classList.toggle("comparing", comparing);
  at("columns").hidden = !comparing;
  at("view").hidden = comparing;
  if (!comparing) return;
  let before;
  at("columns").replaceChildren(...series.map(one => { const box = column(one, before); before = one; return box; }));
  at("columns").querySelector(".now").scrollIntoView({ block: "nearest", inline: "nearest" });
}

const actionsOf = one => one.nodes.filter(node => node.kind === "action");
const textOf = node => `${node.step} ${node.text.trim()}`;

function column(one, before) { // the distinct candidates of each step; those that the version before had not are new
  const box = element("section", undefined, { className: one === tree ? "column now" : "column" }), old = before && new Set(actionsOf(before).map(textOf)), steps = new Map();
  for (const node of actionsOf(one)) {
    const texts = steps.get(node.step) || steps.set(node.step, new Map()).get(node.step);
    texts.set(textOf(node), [...(texts.get(textOf(node)) || []), node]);
  }
  box.append(element("h2", `Version ${one.version}`), element("p", `tree ${one.tree} · ${one.said}`, { className: "dim" }));
  for (const [step, texts] of steps) {
    const all = [...texts.values()];
    const count = all.flat().length;
    box.append(element("h3", `Step ${step}: ${count === 1 ? "one candidate" : `${count} candidates, ${all.length === 1 ? "all the same" : `${all.length} different`}`}`));
    all.sort((a, b) => b.some(node => node.chosen) - a.some(node => node.chosen));
    for (const nodes of all) box.append(candidate(one, nodes, old && !old.has(textOf(nodes[0]))));
  }
  return box;
}

function candidate(one, nodes, fresh) {
  const values = nodes.map(node => valueOf(node, range.name)).filter(value => value !== undefined && value !== null), value = values.length ? sum(values) / values.length : undefined;
  const chosen = nodes.find(node => node.chosen), words = [nodes.length > 1 ? `×${nodes.length}` : "", chosen ? "continued" : "", fresh ? "new" : "", value === undefined ? "" : `${range.name} ${number(value)}`];
  const button = element("button", undefined, { className: chosen ? "chosen" : "" });
  button.style.backgroundImage = tint(value, range) && `linear-gradient(${tint(value, range)}, ${tint(value, range)})`;
  button.append(element("b", words.filter(word => word).join(" · ")), element("span", nodes[0].text.trim()));
  button.addEventListener("click", () => { comparing = false; show(one.tree, (chosen || nodes[0]).id); select(selected); });
  return button;
}

function compare() {
  comparing = !comparing && series.length > 1;
  about();
  if (!comparing) { draw(); select(selected); }
}

function version(by) {
  const next = series[series.indexOf(tree) + by];
  if (next) show(next.tree);
}

at("slider").addEventListener("input", () => show(series[+at("slider").value].tree));
at("compare").addEventListener("click", compare);
