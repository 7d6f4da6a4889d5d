// Files that go with the next message: chosen, dropped or pasted.

import { $, el, icon } from "./dom.js";
import { tell } from "./events.js";
import { readFile } from "./files.js";
import { number } from "./format.js";

let attached = [];

/** Returns the attached files, and detaches them. */
export function takeFiles() {
  const taken = attached;
  attached = [];
  $("files-note").textContent = "";
  showFiles();
  return taken;
}

export const hasFiles = () => attached.length > 0;

async function attach(files) {
  $("files-note").textContent = "";
  for (const file of files) {
    try { attached.push(await readFile(file)); } catch (error) { $("files-note").textContent = error.message; }
  }
  showFiles();
  $("text").focus();
}

function showFiles() {
  $("files").replaceChildren(...attached.map((file) => {
    const onclick = () => detach(file), label = `Remove ${file.name}`;
    const remove = el("button", { type: "button", className: "icon", title: "Remove", "aria-label": label, onclick },
      icon("close"));
    return el("li", {}, el("span", {}, file.name), remove);
  }));
  tell("attached");
}

function detach(file) {
  attached = attached.filter((each) => each !== file);
  showFiles();
  $("text").focus();
}

/** A file of a message, whose text is shown when it is opened. */
export function fileNode({ name, text }) {
  const size = `${number.format(text.length)} ${text.length === 1 ? "character" : "characters"}`;
  const node = el("details", { className: "file" }, el("summary", {}, name, " ", el("small", {}, size)));
  node.addEventListener("toggle", () => {
    if (!node.open || node.querySelector("pre")) return;
    node.append(el("pre", { tabIndex: 0, role: "group", "aria-label": name }, text));
  });
  return node;
}

const bringsFiles = (transfer) => [...(transfer?.types ?? [])].includes("Files");
const dropping = (is) => document.body.classList.toggle("dropping", is);

$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await attach([...$("file").files]);
  $("file").value = ""; // or the same file could not be chosen again
});
$("text").addEventListener("paste", (event) => {
  const { clipboardData } = event;
  // A spreadsheet copies a text and its picture: then the text is meant.
  if (!clipboardData.files.length || clipboardData.getData("text/plain")) return;
  event.preventDefault();
  attach([...clipboardData.files]);
});
document.addEventListener("dragover", (event) => {
  if (!bringsFiles(event.dataTransfer)) return;
  event.preventDefault(); // or the browser would open it
  dropping(true);
});
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) dropping(false); });
document.addEventListener("drop", (event) => {
  if (!bringsFiles(event.dataTransfer)) return;
  event.preventDefault();
  dropping(false);
  attach([...event.dataTransfer.files]);
});
