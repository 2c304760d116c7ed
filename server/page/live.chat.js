// Talks with the model. Conversations stay in this browser: they are kept in its storage, and go out as files only.
"use strict";
const KEPT = "pshard-conversations";
const LARGEST = 1 << 20; // bytes of a file that is attached
let talks = []; // {title, turns: [{role, content, thought, calls}]}, the latest first
let turns = []; // those of the conversation that is seen: an answer that is stopped late stays in its own
let files = [];
let answering = null;

// Keeping.
function isTalk(talk) {
  const text = (value) => value === undefined || typeof value === "string";
  return talk && typeof talk.title === "string" && Array.isArray(talk.turns) && talk.turns.every((turn) => turn &&
    ["user", "assistant"].includes(turn.role) && typeof turn.content === "string" && text(turn.thought) && text(turn.calls));
}

function keep() {
  try {
    localStorage.setItem(KEPT, JSON.stringify(talks));
  } catch {
    addTurn("fault", "This browser keeps no more conversations; export or delete some.");
  }
}

function restore() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT) || "[]");
    talks = Array.isArray(found) ? found.filter(isTalk) : [];
  } catch {
    talks = [];
  }
}

function listTalks() {
  const here = talks.findIndex((talk) => talk.turns === turns);
  const names = here < 0 ? ["New conversation"] : [];
  find("which").replaceChildren(...[...names, ...talks.map((talk) => talk.title)].map((name, i) => {
    const option = document.createElement("option");
    option.textContent = name;
    option.value = String(i - names.length);
    return option;
  }));
  find("which").value = String(here);
  find("forget").disabled = here < 0;
}

function see(own) {
  if (answering) answering.abort();
  turns = own;
  find("talk").replaceChildren();
  for (const turn of turns) {
    if (turn.thought) addFold("thought", "Thought").lastChild.textContent = turn.thought;
    if (turn.content) addTurn(turn.role, turn.content);
    if (turn.calls) addFold("calls", "Calls").lastChild.textContent = turn.calls;
  }
  listTalks();
}

// Showing.
function put(box, before) {
  if (before) before.before(box);
  else find("talk").append(box);
  find("talk").scrollTop = find("talk").scrollHeight;
  return box;
}

function addTurn(sort, text) {
  const box = document.createElement("div");
  box.className = `turn ${sort}`;
  box.textContent = text;
  return put(box);
}

function addFold(sort, name, before) {
  const fold = document.createElement("details");
  fold.className = sort;
  const summary = document.createElement("summary");
  summary.textContent = name;
  fold.append(summary, document.createElement("div"));
  return put(fold, before);
}

// Asking.
async function readAnswer(body, made, box) {
  let thought = null, calls = null;
  const reply = await post("v1/chat/completions", body, answering.signal);
  if (reply.status === 401) askForKey();
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  for await (const data of eventsOf(reply)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices && event.choices[0] ? event.choices[0].delta || {} : {};
    if (delta.reasoning_content) {
      thought = thought || addFold("thought", "Thought", box);
      made.thought = thought.lastChild.textContent += delta.reasoning_content;
    }
    for (const part of delta.tool_calls || []) {
      calls = calls || addFold("calls", "Calls");
      made.calls = calls.lastChild.textContent += (part.function.name ? `\n${part.function.name} ` : "") + part.function.arguments;
    }
    made.content += delta.content || "";
    if (made.content) box.textContent = made.content;
    find("talk").scrollTop = find("talk").scrollHeight;
  }
}

async function answer() {
  const own = turns, made = { role: "assistant", content: "" };
  const messages = own.map(({ role, content }) => ({ role, content }));
  const heat = find("heat").valueAsNumber;
  const body = { messages, stream: true, max_tokens: find("most").valueAsNumber || 512, temperature: Number.isNaN(heat) ? 0.7 : heat };
  const box = addTurn("assistant", "…");
  box.setAttribute("aria-busy", "true");
  answering = new AbortController();
  find("stop").disabled = false;
  find("send").disabled = true;
  let failed = "";
  try {
    await readAnswer(body, made, box);
    if (!made.content) box.textContent = "(no text)";
  } catch (error) {
    if (!made.content) box.remove();
    if (error.name !== "AbortError") failed = error.message || "The server does not answer.";
  }
  if (made.content || made.calls) own.push(made);
  else own.pop();
  box.removeAttribute("aria-busy");
  answering = null;
  find("stop").disabled = true;
  find("send").disabled = false;
  if (failed && own === turns) addTurn("fault", failed);
  talks = talks.filter((talk) => talk.turns.length);
  keep();
  listTalks();
  find("words").focus();
}

find("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = find("words").value.trim();
  if (!words || answering) return;
  const content = [...files.map((file) => `${file.name}:\n\`\`\`\n${file.text}\n\`\`\``), words].join("\n\n");
  find("words").value = "";
  takeFiles([]);
  const talk = talks.find((one) => one.turns === turns) || { title: words.slice(0, 60), turns };
  talks = [talk, ...talks.filter((one) => one !== talk)];
  turns.push({ role: "user", content });
  addTurn("user", content);
  listTalks();
  answer();
});
find("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("chat-form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && answering) answering.abort();
});
find("stop").addEventListener("click", () => answering && answering.abort());

// Files.
function takeFiles(taken) {
  files = taken;
  find("attached").textContent = taken.map((file) => file.name).join(", ");
}

async function readFiles(chosen) {
  const taken = [];
  for (const file of chosen) {
    if (file.size > LARGEST) {
      addTurn("fault", `${file.name} is larger than 1 MiB`);
      continue;
    }
    const text = new TextDecoder("utf-8", { fatal: true });
    try {
      taken.push({ name: file.name, text: text.decode(await file.arrayBuffer()) });
    } catch {
      addTurn("fault", `${file.name} is no text in UTF-8`);
    }
  }
  return taken;
}

find("attach").addEventListener("click", () => find("attach-files").click());
find("attach-files").addEventListener("change", async (event) => {
  takeFiles([...files, ...(await readFiles(event.target.files))]);
  event.target.value = "";
  find("words").focus();
});
find("export").addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ conversations: talks }, null, 1)], { type: "application/json" }));
  link.download = "conversations.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});
find("import").addEventListener("click", () => find("import-file").click());
find("import-file").addEventListener("change", async (event) => {
  const [file] = await readFiles(event.target.files);
  event.target.value = "";
  if (!file) return;
  let found = null;
  try {
    found = JSON.parse(file.text).conversations;
  } catch { /* told below */ }
  if (!Array.isArray(found) || !found.every(isTalk)) {
    addTurn("fault", `${file.name} has no conversations that this page exported`);
    return;
  }
  const known = new Set(talks.map((talk) => JSON.stringify(talk)));
  talks = [...found.filter((talk) => talk.turns.length && !known.has(JSON.stringify(talk))), ...talks];
  keep();
  listTalks();
});

// Conversations.
find("which").addEventListener("change", () => see(Number(find("which").value) < 0 ? [] : talks[Number(find("which").value)].turns));
find("clear").addEventListener("click", () => {
  see([]);
  find("words").focus();
});
find("forget").addEventListener("click", () => {
  talks = talks.filter((talk) => talk.turns !== turns);
  keep();
  see([]);
  find("words").focus();
});
restore();
see(talks.length ? talks[0].turns : []);

// Views: the chat first, the server behind it.
function seeView(server) {
  find("chat").hidden = server;
  find("server").hidden = !server;
  find("see-chat").setAttribute("aria-pressed", String(!server));
  find("see-server").setAttribute("aria-pressed", String(server));
  if (server) readBudgets();
}
find("see-chat").addEventListener("click", () => seeView(false));
find("see-server").addEventListener("click", () => seeView(true));
find("views").hidden = false;
seeView(false);

// Budgets.
let budgets = []; // {mib, rate}
async function readBudgets() {
  const reply = await fetch("props", { headers: headers() }).catch(() => null);
  const plan = reply && reply.ok ? (await reply.json()).plan : null;
  const rates = new Map(((plan && plan.rates) || []).map((rate) => [rate.vram_mib, rate]));
  budgets = (plan ? plan.budgets : []).map((mib) => ({ mib, rate: rates.get(mib) }));
  find("budget-form").hidden = budgets.length < 2;
  if (budgets.length < 2) return;
  find("budget").max = String(budgets.length - 1);
  find("budgets").replaceChildren(...budgets.map((_, i) => new Option("", String(i))));
  find("budget").value = String(budgets.findIndex((each) => each.mib === plan.vram_mib.reduce((a, b) => a + b, 0)));
  tellBudget();
}
function tellBudget() {
  const { mib, rate } = budgets[find("budget").valueAsNumber];
  const size = `${mib.toLocaleString("en")} MiB`;
  find("budget-size").textContent = size;
  find("budget").setAttribute("aria-valuetext", size);
  find("promise").textContent = rate
    ? `Predicted: ${rate.answer.toFixed(1)} tokens/s for one answer, the first token of a prompt of ${rate.prompt.toLocaleString("en")} after ${rate.first.toFixed(2)} s.`
    : "Its plan was made after the last move; its rates are not known yet.";
}
find("budget").addEventListener("input", tellBudget);
find("budget-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  find("move").disabled = true;
  find("promise").textContent = "Moving; running texts go on afterwards.";
  const told = await post("budget", { vram_mib: budgets[find("budget").valueAsNumber].mib })
    .then((reply) => reply.json()).catch(() => ({ error: { message: "The server does not answer." } }));
  find("move").disabled = false;
  await readBudgets();
  find("promise").textContent = told.error ? told.error.message : `The plan in force: ${told.plan}`;
});
