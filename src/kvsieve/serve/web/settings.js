// The system prompt and sampling settings, in a dialog.

import { $ } from "./dom.js";
import { keepSettings, settings } from "./storage.js";

// Names of the request's members; an empty field leaves the server's own value.
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

/** Return the members of a request that the fields set. */
export function sampling() {
  const filled = NUMBERS.filter((name) => $(name).value !== "" && $(name).validity.valid);
  return Object.fromEntries(filled.map((name) => [name, $(name).valueAsNumber]));
}

export const systemPrompt = () => $("system").value.trim();

/** Fill the fields with what the browser has kept, and keep every change. */
export function beginSettings() {
  const kept = settings(), fields = [...NUMBERS, "system"].map($);
  for (const field of fields) {
    field.value = kept[field.id] ?? "";
    field.addEventListener("change", () => {
      if (field.validity.valid) keepSettings({ ...settings(), [field.id]: field.value });
    });
  }
  $("settings-open").addEventListener("click", () => $("settings").showModal());
  $("settings-close").addEventListener("click", () => {
    if (fields.every((field) => field.reportValidity())) $("settings").close();
  });
  // What was refused is not left in its field as if it held.
  $("settings").addEventListener("close", () => {
    for (const field of fields) if (!field.validity.valid) field.value = settings()[field.id] ?? "";
  });
  $("defaults").addEventListener("click", () => {
    for (const field of fields) field.value = "";
    keepSettings({});
  });
}
