// Hides the rows of a table that lack a word of the search field before it, and counts those that are left.
for (const field of document.querySelectorAll("input[data-filter]")) {
  const table = document.getElementById(field.dataset.filter).querySelector("table")
  const rows = [...table.tBodies[0].rows]
  const count = field.parentElement.querySelector("output")
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/)
    for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word))
    count.textContent = `${rows.filter(row => !row.hidden).length} / ${rows.length}`
  }
  field.addEventListener("input", show)
  show()
}
