"use strict";
// The selected node in words: text, scores, what judges said, log-probability of each token.

function describe(node) {
  const parts = [element("h2", `${node.kind} ${node.id}`), element("p", told(node), { className: "dim" })];
  for (const url of node.pictures || []) parts.push(element("img", undefined, { src: url, alt: "A picture that the policy saw" }));
  if (node.kind === "action") parts.push(form(node));
  parts.push(element("h3", "Text"), matched(node.text));
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

function matched(text) {
  const box = element("pre"), lower = text.toLowerCase();
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
