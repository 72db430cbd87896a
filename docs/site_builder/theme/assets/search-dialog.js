// The dialog of the search is in a shadow root, which site.css does not reach, and has English words only.
const words = {
  ar: {
    "Search": "ابحث",
    "Close search": "أغلق البحث",
    "Search results": "نتائج البحث",
    "No results": "لا توجد نتائج",
    "Loading search…": "يُحمَّل البحث…",
    "Search is unavailable. Reload the page to try again.": "البحث غير متاح؛ أعد تحميل الصفحة",
  },
}[document.documentElement.lang]
const style = `
  code { direction: ltr; unicode-bidi: isolate; }
  [aria-label="Filters"] { display: none; } /* of tags, which no page has */
  [role=listbox]:empty { display: none; }
  [role=option] h2 { overflow-wrap: anywhere; }
  [role=option] mark { color: var(--md-typeset-a-color); }
  [role=option] [id$="-path"] { color: rgb(var(--color-foreground) / .7); }
  [role=option] [id$="-path"] li { white-space: normal; }
  @media (max-width: 740px) { /* the dialog fills the screen, and its magnifier is the button that closes it */
    button > .lucide-search { display: none; }
    button:has(> .lucide-search)::after { content: "×"; color: rgb(var(--color-foreground) / .7); font-size: 26px; }
  }
`

function translate(root) {
  const texts = document.createNodeIterator(root, NodeFilter.SHOW_TEXT)
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const count = text.data.match(/^([\d,]+) results?$/)
    const translated = count ? `عدد النتائج: ${count[1]}` : words[text.data]
    if (translated && !text.parentElement.closest("li")) text.data = translated
  }
  for (const element of root.querySelectorAll("[aria-label], [placeholder]")) {
    for (const name of ["aria-label", "placeholder"]) {
      const translated = words[element.getAttribute(name)]
      if (translated) element.setAttribute(name, translated)
    }
  }
}

new MutationObserver((_, observer) => {
  const root = [...document.body.children].map(each => each.shadowRoot).find(each => each)
  if (!root) return
  observer.disconnect()
  root.append(Object.assign(document.createElement("style"), { textContent: style }))
  if (!words) return
  translate(root)
  new MutationObserver(() => translate(root)).observe(root, { subtree: true, childList: true, characterData: true })
}).observe(document.body, { childList: true })
