// Puts the server's events into the page, and talks with the model. The page is readable without it.
"use strict";
const find = (id) => document.getElementById(id);
let key = sessionStorage.getItem("key") || "";
const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

// The data of each server-sent event of an answer, with the event's name.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const whole = (rest + value).split(/\r?\n\r?\n/);
    rest = whole.pop();
    for (const block of whole) {
      const lines = block.split(/\r?\n/);
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (data.length) yield data.join("\n");
    }
  }
}

// What happens on the server: only while the page is seen.
let looking = null;
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function look() {
  for (let pause = 1000; looking; pause = Math.min(10000, 2 * pause)) {
    try {
      const answer = await fetch("events", { headers: headers(), signal: looking.signal });
      if (answer.status === 401) return askForKey();
      if (answer.ok) {
        find("key-form").hidden = true;
        find("link").textContent = "";
        pause = 1000;
        for await (const data of eventsOf(answer)) show(JSON.parse(data));
      }
    } catch (error) {
      if (error.name === "AbortError") return;
    }
    find("link").textContent = "The server does not answer; this is what it did last.";
    await wait(pause);
  }
}

function show(parts) {
  for (const [id, html] of Object.entries(parts)) find(id).innerHTML = html; // the server escapes what it writes
}

function follow() {
  if (looking) looking.abort();
  looking = document.hidden ? null : new AbortController();
  if (looking) look();
}

function askForKey() {
  find("state").textContent = key ? "The key is wrong." : "This server wants a key.";
  find("key-form").hidden = false;
  find("key").focus();
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value.trim();
  sessionStorage.setItem("key", key);
  find("state").textContent = "";
  follow();
});
document.addEventListener("visibilitychange", follow);
follow();

// The chat.
let turns = []; // another list for another conversation: an answer that is stopped late stays in its own
let answering = null;

function addTurn(sort, text) {
  const box = document.createElement("div");
  box.className = `turn ${sort}`;
  box.textContent = text;
  find("talk").append(box);
  find("talk").scrollTop = find("talk").scrollHeight;
  return box;
}

async function answer() {
  const own = turns;
  const body = {
    messages: own, stream: true, max_tokens: find("most").valueAsNumber || 512,
    temperature: Number.isNaN(find("heat").valueAsNumber) ? 0.7 : find("heat").valueAsNumber,
  };
  const box = addTurn("assistant", "…");
  box.setAttribute("aria-busy", "true");
  const thought = document.createElement("details");
  thought.className = "thought";
  thought.innerHTML = "<summary>Thought</summary><div></div>";
  let said = "";
  answering = new AbortController();
  find("stop").disabled = false;
  find("send").disabled = true;
  try {
    const reply = await fetch("v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), signal: answering.signal,
      headers: { ...headers(), "Content-Type": "application/json" },
    });
    if (reply.status === 401) askForKey();
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const data of eventsOf(reply)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices && event.choices[0] ? event.choices[0].delta || {} : {};
      if (delta.reasoning_content) {
        if (!thought.isConnected) box.before(thought);
        thought.lastChild.textContent += delta.reasoning_content;
      }
      said += delta.content || "";
      if (said) box.textContent = said;
      find("talk").scrollTop = find("talk").scrollHeight;
    }
    if (!said) box.textContent = "(no text)";
  } catch (error) {
    if (!said) box.remove();
    if (error.name !== "AbortError") addTurn("fault", error.message || "The server does not answer.");
  }
  if (said) own.push({ role: "assistant", content: said });
  else own.pop();
  box.removeAttribute("aria-busy");
  answering = null;
  find("stop").disabled = true;
  find("send").disabled = false;
  find("words").focus();
}

find("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = find("words").value.trim();
  if (!words || answering) return;
  find("words").value = "";
  turns.push({ role: "user", content: words });
  addTurn("user", words);
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
find("clear").addEventListener("click", () => {
  if (answering) answering.abort();
  turns = [];
  find("talk").replaceChildren();
  find("words").focus();
});
find("chat").hidden = false;
