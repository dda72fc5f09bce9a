// The explorer's form and its answer. What is decided, and every sentence, comes from attnroute itself (worker.js).
const form = document.getElementById("explorer-form");
const output = document.getElementById("explorer-answer");
const brief = document.getElementById("explorer-brief");
const line = document.getElementById("explorer-line");
const words = [...form.querySelectorAll("[data-words]")];

/** Make an element with properties and children. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// ---- The call's line and the controls that write its words ----

/** A control's words with the sizes of other controls in them: "dense=1x1x{sq}x{skv}". */
const filled = (text) =>
  text.replace(/{(\w+)}/g, (_, name) => (form.elements[name].value.match(/\d+|bf16|fp\w+/) ?? [""])[0]);

/** What a control adds to the line. */
function wordsOf(control) {
  if (control.type === "checkbox") return control.checked ? control.dataset.words : "";
  if (control.tagName === "SELECT") return filled(control.value);
  const value = control.value.trim();
  return value && control.dataset.words.replace("*", value);
}

/** Set the control that writes a word; false where none does. */
function takeWord(word) {
  return words.some((control) => {
    if (control.type === "checkbox") return control.dataset.words === word && (control.checked = true);
    if (control.tagName === "SELECT") {
      const option = [...control.options].find(({ value }) => value && filled(value) === word);
      return option !== undefined && (option.selected = true);
    }
    const [head, tail] = control.dataset.words.split("*");
    const value = word.startsWith(head) && word.endsWith(tail) ? word.slice(head.length) : "";
    if (!head || !new RegExp(`^(${control.pattern})$`).test(value)) return false;
    control.value = value;
    return true;
  });
}

function readLine(text) {
  for (const control of words) {
    if (control.type === "checkbox") control.checked = false;
    else if (control.name !== "dtype") control.value = "";
  }
  // Sizes first: what other words say is compared with them.
  const given = text.trim().split(/\s+/).sort((a, b) => /[=(]/.test(a) - /[=(]/.test(b));
  form.elements.more.value = given.filter((word) => word && !takeWord(word)).join(" ");
}

const writtenLine = () => words.map(wordsOf).filter(Boolean).join(" ");

// ---- Card and versions ----

const versions = () => [...form.querySelectorAll("[data-version]")].filter(({ value }) => value);

function fill(choices) {
  const cards = form.elements.card;
  for (const [arch, names] of Object.entries(choices.cards)) {
    const group = make("optgroup", { label: arch });
    for (const name of names.length ? names : [""]) group.append(make("option", { value: `${arch}|${name}` }, name || arch));
    cards.append(group);
  }
  cards.value = "sm_90|H100";
  for (const [name, known] of Object.entries(choices.releases)) {
    const bundled = choices.bundled.includes(name);
    const select = make("select", { name, id: `explorer-${name}` });
    select.dataset.version = name;
    if (name !== "torch") select.append(make("option", { value: "" }, bundled ? "as torch brings it" : "not installed"));
    for (const version of known) select.append(make("option", { value: version }, version));
    const label = make("label", { htmlFor: select.id }, name);
    document.getElementById(bundled ? "explorer-bundled" : "explorer-packages").append(make("div", {}, label, select));
  }
  for (const [name, call] of Object.entries(choices.calls)) form.elements.example.append(make("option", { value: call }, name));
}

function installAll(isWanted) {
  for (const select of document.querySelectorAll("#explorer-packages select")) select.selectedIndex = isWanted ? 1 : 0;
  ask();
}

// ---- Questions ----

const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
let asked = null;
let isBusy = false;

function question() {
  const [arch, card] = form.elements.card.value.split("|");
  const given = versions().map(({ name, value }) => [name, value]);
  return JSON.stringify({ arch, card, versions: Object.fromEntries(given), line: line.value });
}

/** Ask what the form says; questions that were overtaken by another are not answered. */
function ask({ isTyped = false } = {}) {
  if (!isTyped) line.value = writtenLine();
  const address = new URLSearchParams({ card: form.elements.card.value, call: line.value });
  for (const { name, value } of versions()) address.set(name, value);
  history.replaceState(null, "", `?${address}`);
  if (question() === asked) return;
  asked = question();
  output.setAttribute("aria-busy", "true");
  if (!isBusy) send();
}

function send() {
  isBusy = true;
  worker.postMessage(asked);
}

worker.onmessage = ({ data }) => {
  if (data.failed) return stop(data.failed);
  if (data.ready) return;
  isBusy = false;
  if (data.question !== asked) return send();
  show(data.answer);
};
worker.onerror = () => stop("worker.js");

function stop(reason) {
  output.replaceChildren(make("p", { className: "explorer-refused" }, `What runs the decisions could not be loaded (${reason}). In a checkout, nox -s docs builds it.`));
  output.removeAttribute("aria-busy");
}

// ---- The answer ----

let pages = {};

/** The parts of a sentence, its ids of rows as links to their entries in the reference. */
function linked(text) {
  return text.split(/(?<=\[)([\w/-]+)(?=\])/).map((part) => {
    if (!Object.hasOwn(pages, part)) return part;
    const [file, mark] = pages[part].split("#");
    return make("a", { href: `../reference/${file.replace(".md", "/")}${mark ? `#${mark}` : ""}` }, part);
  });
}

/** A predicted time; one that is inferred from another card puts nothing in order. */
function milliseconds({ ms, is_inferred }) {
  return ms === null ? "" : `${is_inferred ? "≈ " : ""}${Number(ms.toPrecision(3))} ms`;
}

function row(verdict, longest) {
  const bar = make("span", { className: "explorer-bar" });
  // Square roots, so that what is fast can still be told apart beside what is slow.
  bar.style.width = verdict.ms === null ? "0" : `${100 * Math.sqrt(verdict.ms / longest)}%`;
  const summary = make(
    "summary",
    {},
    make("span", { className: "explorer-name" }, verdict.backend),
    make("span", { className: "explorer-status" }, verdict.status),
    make("span", { className: "explorer-time" }, milliseconds(verdict)),
    make("span", { className: "explorer-track" }, bar),
    make("span", { className: "explorer-repairs" }, verdict.repairs.length ? `after ${verdict.repairs.join(", ")}` : ""),
  );
  const reasons = verdict.reasons.map((reason) => make("li", {}, ...linked(reason)));
  const about = make("a", { href: `../reference/${verdict.backend}/` }, verdict.title);
  return folded(`explorer-${verdict.backend}`, verdict.status, summary, make("p", {}, about, `: ${verdict.sum}.`), make("ul", {}, ...reasons));
}

/** A part that opens; what the reader opened stays open in the next answer. */
function folded(id, className, ...children) {
  const isOpen = document.getElementById(id)?.open ?? className === "selected";
  return make("details", { id, className, open: isOpen }, ...children);
}

function notes(answer) {
  const inferred = answer.verdicts.some(({ is_inferred }) => is_inferred);
  return [
    answer.order && `Order ${answer.order}.`,
    inferred && "≈ was inferred from another card, and puts nothing in order.",
    `On ${answer.host}.`,
  ].filter(Boolean);
}

function show(answer) {
  output.removeAttribute("aria-busy");
  output.decision = answer.json;
  if (answer.refused) {
    brief.replaceChildren("refused");
    return output.replaceChildren(make("p", { className: "explorer-refused" }, answer.refused));
  }
  pages = answer.pages;
  const time = answer.selected ? milliseconds(answer.verdicts[0]) : "";
  brief.replaceChildren(make("strong", {}, answer.selected ?? "none"), ` ${time}`);
  const longest = Math.max(...answer.verdicts.map(({ ms }) => ms ?? 0));
  const text = (id, title, said) => folded(id, "", make("summary", {}, title), make("pre", {}, make("code", {}, said)));
  const hints = answer.hints.map((hint) => make("li", {}, hint));
  output.replaceChildren(
    make("p", { className: "explorer-selected" }, make("strong", {}, answer.selected ?? "none"), ` ${time}`),
    make("p", { className: "explorer-why" }, ...linked(`${answer.why}.`)),
    make("p", {}, ...linked(answer.stock && `scaled_dot_product_attention ${answer.stock}.`)),
    make("div", { className: "explorer-verdicts" }, ...answer.verdicts.map((verdict) => row(verdict, longest))),
    make("p", { className: "explorer-small" }, ...linked(notes(answer).join(" "))),
    ...(hints.length ? [make("p", {}, make("strong", {}, "What would change it")), make("ul", { className: "explorer-hints" }, ...hints)] : []),
    text("explorer-command", "The same in a terminal", answer.command),
    text("explorer-text", "The whole explanation", answer.text),
    text("explorer-json", "The decision as JSON", answer.json),
  );
}

// ---- Start ----

function readAddress() {
  const address = new URLSearchParams(location.search);
  for (const [name, value] of address) {
    if (form.elements[name]?.tagName === "SELECT" && name !== "example") form.elements[name].value = value;
  }
  readLine(address.get("call") ?? form.elements.example.options[1].value);
}

form.addEventListener("input", () => ask());
form.addEventListener("change", ({ target }) => {
  if (target.name === "example") {
    readLine(target.value);
    target.value = "";
  }
  ask();
});
form.addEventListener("submit", (event) => event.preventDefault());
line.addEventListener("input", () => ask({ isTyped: true }));
line.addEventListener("change", () => readLine(line.value));
document.getElementById("explorer-all").addEventListener("click", () => installAll(true));
document.getElementById("explorer-none").addEventListener("click", () => installAll(false));

try {
  const response = await fetch(new URL("runtime/choices.json", import.meta.url));
  fill(await response.json());
  readAddress();
  ask();
} catch (error) {
  stop(error);
}
