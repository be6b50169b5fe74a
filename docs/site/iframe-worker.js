// Pages opened as files may not start workers. This stands in for the worker of the search: its script runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }))
      const scope = (this.scope = frame.contentWindow)
      scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise(resolve => {
        const script = Object.assign(frame.contentDocument.createElement("script"), { src: url, onload: resolve })
        frame.contentDocument.body.appendChild(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
