"use strict";
// A person's marks on candidates. They are saved as a whole file, which coppice trees and coppice sft read beside the run.
const MARKS = { g: "good", b: "bad", u: "unsure" }, SIGNS = { good: "✓", bad: "✗", unsure: "?" };
const marks = new Map(data.marks.map(mark => [`${mark.tree}:${mark.node}`, mark]));
let unsaved = 0, handle;

const markOf = (one, node) => marks.get(`${one.tree}:${node.id}`);

function marksOf(one) { // how many marks of each kind a tree has, in words
  const kinds = one.nodes.map(node => markOf(one, node)).filter(mark => mark).map(mark => mark.mark);
  return Object.keys(SIGNS).map(kind => [kinds.filter(one => one === kind).length, kind]).filter(([count]) => count).map(([count, kind]) => `${SIGNS[kind]} ${count} ${kind}`);
}

function put(kind, note) { // a kind that the node has already is taken back
  const node = byId.get(selected), key = `${tree.tree}:${selected}`, before = marks.get(key);
  if (!node || node.kind !== "action") return;
  if (note === undefined && before && before.mark === kind) marks.delete(key);
  else marks.set(key, { tree: tree.tree, node: selected, mark: kind, task: tree.task, note: note ?? (before ? before.note : "") });
  unsaved += 1;
  at("save").disabled = false;
  at("save").textContent = "Save marks *";
  at("saved").textContent = "";
  repaint(selected);
  rows();
  for (const button of document.querySelectorAll("fieldset button")) button.setAttribute("aria-pressed", (marks.get(key) || {}).mark === button.value);
}

function form(node) {
  const mark = markOf(tree, node), box = element("fieldset"), note = element("input", undefined, { id: "note", placeholder: "why (note)", value: mark ? mark.note : "", ariaLabel: "Note" });
  box.append(element("legend", "Your mark"));
  for (const [kind, sign] of Object.entries(SIGNS)) {
    const button = element("button", `${sign} ${kind}`, { value: kind });
    button.setAttribute("aria-pressed", !!mark && mark.mark === kind);
    button.addEventListener("click", () => put(kind));
    box.append(button);
  }
  note.addEventListener("input", () => put((markOf(tree, node) || { mark: "unsure" }).mark, note.value));
  box.append(note);
  return box;
}

async function save() {
  const text = [...marks.values()].map(mark => JSON.stringify(mark) + "\n").join(""), saved = unsaved;
  try {
    if (window.showSaveFilePicker) { // a file of the person's choice, which the next save writes again
      handle ??= await window.showSaveFilePicker({ suggestedName: "marks.jsonl" });
      const file = await handle.createWritable();
      await file.write(text);
      await file.close();
    } else {
      const url = URL.createObjectURL(new Blob([text]));
      element("a", undefined, { href: url, download: "marks.jsonl" }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10000);
    }
  } catch (error) {
    if (error.name !== "AbortError") { handle = undefined; at("saved").textContent = `not saved: ${error.message}`; }
    return;
  }
  if (saved === unsaved) { unsaved = 0; at("save").textContent = "Save marks"; }
  at("saved").textContent = `${marks.size} saved; their place is marks.jsonl in ${data.run}`;
}

at("save").addEventListener("click", save);
addEventListener("beforeunload", event => { if (unsaved) event.preventDefault(); });
