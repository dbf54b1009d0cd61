// Elements, numbers and the clipboard.

export const $ = (id) => document.getElementById(id);

/** Make an element; properties whose names begin with "aria" or "data" are set as attributes. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (/^(aria|data)-|^role$|^for$/.test(name)) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Make a button that does not submit its form. label: its name for screen readers, where it says more than the text. */
export function button(text, action, label) {
  const made = el("button", { type: "button", textContent: text, "aria-label": label });
  made.addEventListener("click", action);
  return made;
}

export const count = (value) => Math.round(value).toLocaleString("en-US");

export function bytes(value) {
  if (value >= 2 ** 30) return (value / 2 ** 30).toFixed(2) + " GiB";
  return value >= 2 ** 20 ? (value / 2 ** 20).toFixed(1) + " MiB" : (value / 2 ** 10).toFixed(1) + " KiB";
}

/** Copy text, and say so on the button for a moment. */
export async function copy(text, pressed) {
  const before = pressed.textContent;
  pressed.textContent = (await copied(text)) ? "Copied" : "Not copied";
  setTimeout(() => { pressed.textContent = before; }, 1500);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages that come over plain HTTP from another machine have no clipboard.
    const field = el("textarea", { value: text, className: "off" });
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}
