// Runs attnroute itself in the browser: Python (Pyodide), its wheels, and answer.py. A question in, an answer out.
import { loadPyodide } from "./runtime/pyodide.mjs";

const at = (path) => new URL(path, import.meta.url);
const fetched = async (path) => {
  const response = await fetch(at(path));
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response;
};

async function start() {
  const names = await (await fetched("runtime/wheels.json")).json();
  const files = names.map(async (name) => (await fetched(`runtime/${name}`)).arrayBuffer());
  const source = fetched("answer.py").then((response) => response.text());
  const python = await loadPyodide({ indexURL: at("runtime/").href });
  for (const file of files) python.unpackArchive(await file, "wheel");
  python.FS.writeFile("answer.py", await source);
  return python.pyimport("answer").answer;
}

const started = start();
started.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error) }),
);
onmessage = async ({ data }) => {
  const answer = await started;
  postMessage({ question: data, answer: JSON.parse(answer(data)) });
};
