// The search runs in a worker. A browser starts none for a page that is opened as a file: there a hidden frame runs
// the same script, with the worker's way to send and receive messages: each is a copy, which its receiver may change.
if (location.protocol === "file:") {
  const message = data => new MessageEvent("message", { data: structuredClone(data) })
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.isReady = new Promise((resolve, reject) => {
        this.frame.addEventListener("load", () => {
          const inner = this.frame.contentWindow
          inner.postMessage = data => this.receive(message(data))
          const script = inner.document.createElement("script")
          script.src = url
          script.onload = resolve
          script.onerror = reject
          inner.document.body.append(script)
        }, { once: true })
      })
      this.isReady.catch(() => this.receive(new Event("error", { cancelable: true })))
      document.body.append(this.frame)
    }

    receive(event) {
      this["on" + event.type]?.(event)
      this.dispatchEvent(event)
    }

    postMessage(data) {
      const sent = message(data)
      this.isReady.then(() => this.frame.contentWindow.dispatchEvent(sent))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
