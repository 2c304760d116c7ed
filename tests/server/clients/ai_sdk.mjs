// The AI SDK against a server: tools together with an object as output, whole and streamed. Prints JSON.
import { pathToFileURL } from 'node:url'
import { createRequire } from 'node:module'
const require = createRequire(pathToFileURL(process.env.MODULES + '/x.js'))
const load = name => import(pathToFileURL(require.resolve(name)))
const { generateText, jsonSchema, Output, stepCountIs, streamText, tool } = await load('ai')
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible')
const { createOpenAI } = await load('@ai-sdk/openai')
const { createAnthropic } = await load('@ai-sdk/anthropic')

const baseURL = process.env.SERVER + '/v1', apiKey = 'a-key'
const models = {
  chat: createOpenAICompatible({ name: 'local', baseURL, apiKey, supportsStructuredOutputs: true }).chatModel('demo'),
  responses: createOpenAI({ baseURL, apiKey }).responses('demo'),
  messages: createAnthropic({ baseURL, apiKey }).messages('demo'),
}
const place = jsonSchema({
  type: 'object', properties: { city: { enum: ['Rome', 'Bern'] } }, required: ['city'], additionalProperties: false,
})
const hours = jsonSchema({ type: 'object', properties: { hour: { enum: ['noon', 'night'] } }, required: ['hour'] })
const told = {}
for (const [name, model] of Object.entries(models)) {
  for (const [way, ask] of [['whole', generateText], ['streamed', streamText]]) {
    const calls = []
    const clock = tool({
      description: 'the time', inputSchema: hours, execute: async ({ hour }) => { calls.push(hour); return 'late' },
    })
    const given = { model, prompt: 'ROMEO:', maxOutputTokens: 80, maxRetries: 0, stopWhen: stepCountIs(2) }
    const found = ask({ ...given, tools: { clock }, output: Output.object({ schema: place }), onError: () => {} })
    let object = null, cut = false
    try {
      object = await (await found).output
    } catch (error) {
      cut = error.finishReason === 'length' // a weak model may call until no token or no step is left
      if (!calls.length && !cut) throw error
    }
    told[`${name} ${way}`] = { calls, object, cut }
  }
}
console.log(JSON.stringify(told))
