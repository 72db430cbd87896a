// Names and keyboard access that the theme leaves out. Its own script adds to tables and code when the page is loaded.
for (const label of document.querySelectorAll("label.md-nav__link[id]")) {
  if (label.textContent.trim()) continue
  const nav = document.querySelector(`nav[aria-labelledby="${label.id}"]`)
  label.title = nav.ariaLabel = nav.querySelector("label").textContent.trim()
  nav.removeAttribute("aria-labelledby")
}
addEventListener("load", () => {
  for (const buttons of document.querySelectorAll(".md-code__nav")) buttons.role = "none"
  for (const part of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) {
    // Wide tables and long lines scroll; the theme lets the keyboard reach only the code that is on the screen.
    new ResizeObserver(() => { if (part.scrollWidth > part.clientWidth) part.tabIndex = 0 }).observe(part)
  }
})
// On a small screen, labels open the navigation, the search and the table of contents; buttons do so for the keyboard too.
for (const label of document.querySelectorAll("label:is(.md-header__button, .md-sidebar-button):is([for=__drawer], [for=__search], [for=__toc])")) {
  const button = document.createElement("button")
  const input = label.control
  button.type = "button"
  for (const { name, value } of label.attributes) button.setAttribute(name, value) // the theme's style selects by them
  if (input.id === "__toc") button.ariaLabel = document.querySelector("label.md-nav__title[for=__toc]").textContent.trim()
  button.append(...label.childNodes)
  button.addEventListener("click", () => input.click())
  label.replaceWith(button)
}
for (const [id, panel] of [["__drawer", ".md-sidebar--primary"], ["__toc", ".md-sidebar--secondary"]]) {
  const input = document.getElementById(id)
  const opener = document.querySelector(`button[for=${id}]`)
  if (!opener) continue // a page without sections has no table of contents
  opener.ariaExpanded = false
  input.addEventListener("change", () => {
    opener.ariaExpanded = input.checked
    const target = input.checked ? document.querySelector(`${panel} a`) : opener
    target.focus()
  })
  addEventListener("keydown", ({ key }) => { if (key === "Escape" && input.checked) input.click() })
}
// Long names break at their dots and underscores.
for (const name of document.querySelectorAll(".doc-object-name")) {
  name.replaceChildren(...name.textContent.split(/(?<=[._])/).flatMap(part => [part, document.createElement("wbr")]))
}
// In a narrow column of a table, code breaks at its signs and not within a word or before the ending of a file.
const breaks = new RegExp([
  /(?<=[_/=(])(?=[^_/=()])/,
  /(?<=\w)(?=\.(?!(?:py|txt|jsonl?|ya?ml|md)\b)[A-Za-z])/,
  /(?<=[a-z])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z]{2})/,
].map(each => each.source).join("|"))
for (const code of document.querySelectorAll(".md-typeset :is(th, td + td) code")) {
  const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT)
  const texts = []
  while (walker.nextNode()) if (!walker.currentNode.parentElement.closest(".word")) texts.push(walker.currentNode)
  for (const text of texts) {
    const parts = text.data.split(breaks)
    text.replaceWith(...parts.flatMap((part, index) => index ? [document.createElement("wbr"), part] : [part]))
  }
}
// On a phone each row of a table is a list, whose entries begin with the head of their column.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const heads = [...table.tHead?.rows[0]?.cells ?? []].map(cell => cell.textContent.trim())
  if (heads.length < 3) continue
  for (const row of table.tBodies[0].rows) {
    heads.slice(1).forEach((head, index) => { if (head) row.cells[index + 1]?.setAttribute("data-head", `${head}: `) })
  }
}
