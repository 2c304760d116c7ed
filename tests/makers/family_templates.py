"""Chat templates in the manner of each family, written for these tests: what their published ones use of Jinja."""

CHATML_TOOLS = """{%- macro as_text(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}
            {%- if part.type == 'text' or 'text' in part -%}{{- part.text -}}
            {%- else -%}{{- raise_exception('no pictures here') -}}{%- endif -%}
        {%- endfor -%}
    {%- elif content is none or content is undefined -%}{{- '' -}}
    {%- else -%}{{- raise_exception('what is this?') -}}{%- endif -%}
{%- endmacro -%}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- as_text(messages[0].content) | trim + '\\n\\n' }}{%- endif %}
    {{- '# What you can call\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + as_text(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(many=false, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if not ns.many and message.role == 'user' and not (as_text(message.content).startswith('<answer>')) %}
        {%- set ns.many = true %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = as_text(message.content) | trim %}
    {%- if message.role == 'system' and not loop.first %}{{- raise_exception('only one system message') }}
    {%- elif message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- if message.tool_calls is defined and message.tool_calls is iterable %}
            {%- for call in message.tool_calls %}
                {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
                {{- '\\n<call=' + call.name + '>' }}
                {%- for name, value in call.arguments | items %}
                    {%- set value = value | tojson if value is mapping or (value is sequence and value is not string)
                        else value | string %}
                    {{- '\\n<arg=' + name + '>' + value + '</arg>' }}
                {%- endfor %}
                {{- '</call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<answer>\\n' + content + '\\n</answer>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- set today = strftime_now('%Y') %}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{%- set system = messages[0]['content'] %}
    {%- else %}{%- set system = messages[0]['content'] | map(attribute='text') | join('') %}{%- endif %}
    {%- set rest = messages[1:] %}
{%- else %}{%- set system = 'It is ' + today + ', not ' + ((today | int - 1) | string) + '.' %}
    {%- set rest = messages %}{%- endif %}
{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- if tools is defined and tools is not none and tools | length > 0 %}
    {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
    {%- if message.role == 'user' or (message.role == 'assistant' and (message.tool_calls is not defined or
            message.tool_calls is none or message.tool_calls | length == 0)) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('they take turns, but turn ' ~ loop.index ~ ' is of ' ~ message.role) }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if message.content is string %}{{- '[INST]' + message.content + '[/INST]' }}
        {%- else %}{{- '[INST]' }}
            {%- set blocks = message.content | sort(attribute='type', reverse=True) %}
            {%- for block in blocks %}
                {%- if block.type == 'text' %}{{- block.text }}
                {%- elif block.type in ['image', 'image_url'] %}{{- '[IMG]' }}
                {%- else %}{{- raise_exception('only text and pictures') }}{%- endif %}
            {%- endfor %}{{- '[/INST]' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {%- if message.content is string and message.content != '' %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set given = call.function.arguments %}
            {%- if given is not string %}{%- set given = given | tojson | safe %}
            {%- elif given == '' %}{%- set given = '{}' %}{%- endif %}
            {{- '[TOOL_CALLS]' + call['function']['name'] + '[ARGS]' + given }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content | string + '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user, assistant and tool: got ' + message.role + '.') }}{%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set before = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set before = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set before = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('take turns') }}{%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}{%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (before if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception('no such content') }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

GLM = """[gMASK]<sop>
{%- if tools %}
<|system|>
You may call these:
{% for tool in tools %}
{%- if 'function' in tool %}{%- set tool = tool['function'] %}{%- endif %}

## {{ tool['name'] }}

{{ tool | tojson(indent=4, ensure_ascii=False) }}
{%- endfor %}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}<|system|>
{{ m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- for call in m.tool_calls %}<|assistant|>{{ call.function.name }}
{% set given = call.function.arguments %}{% for k, v in given.items() %}<k>{{ k }}</k>
<v>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</v>
{% endfor %}{% endfor %}
{%- elif m.role == 'tool' or m.role == 'function' %}<|observation|>
{{ m.content if m.content is string else m.content | map(attribute='output') | join('\\n') }}
{%- else %}<|{{ m.role }}|>
{{ m.content if m.content is string
   else m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}
{%- endif %}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>
{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{% endif %}"""

PHI = """{% for message in messages %}
{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{% elif message['content'] is string and message['content'] | length %}{{ '<|' + message['role'] + '|>\\n' }}
{{- message['content'] + '<|end|>\\n' }}
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

SMOL = """{# what was not given #}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- if enable_thinking -%}{%- set mode = '/think' -%}{%- else -%}{%- set mode = '/no_think' -%}{%- endif -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}
    {%- set system_message = messages[0].content -%}
    {%- if '/no_think' in system_message -%}{%- set mode = '/no_think' -%}{%- endif -%}
    {%- set own = system_message.replace('/no_think', '').replace('/think', '').rstrip() -%}
{%- endif -%}
{{- 'Today: ' ~ strftime_now('%B %Y') | upper ~ '\\nMode: ' ~ mode ~ '\\n\\n' -}}
{%- if own -%}{{- own + '\\n\\n' -}}
{%- else -%}{{- 'You answer' ~ (' after a thought' if mode == '/think') ~ '.' -}}{%- endif -%}
{%- if xml_tools or tools -%}
    {%- set ns = namespace(lines='<tools>\\n') -%}
    {%- for tool in (xml_tools or tools)[:] -%}
        {%- set ns.lines = ns.lines ~ (tool | string) ~ '\\n' -%}
    {%- endfor -%}
    {{- ns.lines + '</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' -%}{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' -%}
        {%- generation -%}
        {%- set content = '<think>\\n\\n</think>\\n' ~ content if mode == '/no_think' else content -%}
        {{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}
        {%- endgeneration -%}
    {%- elif message.role == 'tool' -%}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n' ~ ('' if mode == '/think' else '<think>\\n\\n</think>\\n') }}
{%- endif -%}"""

GRANITE = """{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = 'Of ' + strftime_now('%d.%m.') + '; you are Granite.' %}
    {%- if tools and documents %}{%- set system_message = system_message + ' Call and cite.' %}
    {%- elif tools %}{%- set system_message = system_message + ' Call.' %}
    {%- elif documents %}{%- set system_message = system_message + ' Cite.' %}{%- endif %}
    {%- if controls and 'length' in controls and controls['length'] is not none %}
        {%- set system_message = system_message + ' Length: ' + controls['length'] %}
    {%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- if documents %}
    {%- for document in documents %}
        {{- '<|start_of_role|>document {"id": "' + document['doc_id'] | string + '"}<|end_of_role|>' }}
        {{- document['text'] + '<|end_of_text|>\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + (message['content'] or '') | string }}
    {{- '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson }}{%- endif %}{{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""

SEED = """{%- macro kind_of(t) -%}
    {%- if t == 'string' -%}str{%- elif t in ('number', 'integer') -%}int{%- elif t is mapping -%}{{ kind_of(t.type) }}
    {%- else -%}Any{%- endif -%}
{%- endmacro -%}
{%- set bos = '<seed:bos>' -%}{%- set eos = '<seed:eos>' -%}
{%- set budgets = {0: 0, 512: 128, 1024: 256} -%}
{%- set ns = namespace(interval=None) -%}
{%- if thinking_budget is not defined -%}{%- set thinking_budget = -1 -%}{%- endif -%}
{%- for k, v in budgets | dictsort -%}
    {%- if ns.interval is none and thinking_budget <= k -%}{%- set ns.interval = v -%}{%- endif -%}
{%- endfor -%}
{{ bos }}system
{% if tools is iterable and tools | length > 0 %}{% for item in tools if item.type == 'function' %}
Function:
def {{ item.function.name }}({% for name, spec in item.function.parameters.properties.items() %}
{{- name }}: {{ kind_of(spec.type) }}{% if name not in item.function.parameters.required %} = None{% endif %}
{%- if not loop.last %}, {% endif %}{% endfor %}):
    \"\"\"{{ item.function.description | default('none', true) | trim | indent(4) }}\"\"\"
{% endfor %}{% endif %}
{%- if ns.interval is not none %}Reflect every {{ '%d' % ns.interval }} tokens.{% endif %}{{ eos }}
{%- for message in messages %}
{%- if loop.index > 40 %}{% break %}{% endif %}
{%- if message.role == 'skip' %}{% continue %}{% endif %}
{{ bos }}{{ message.role }}
{% if message.reasoning_content is defined and message.reasoning_content is string %}<seed:think>
{{- message.reasoning_content | trim }}</seed:think>{% endif %}
{%- for call in message.tool_calls | default([]) %}{% for k, v in (call.function.arguments | items) %}
<p={{ k }}>{{ v if v is string else v | tojson(separators=(',', ':'), sort_keys=true) }}</p>{% endfor %}{% endfor %}
{{- message.content | string | trim if message.content else '' }}{{ eos }}
{%- else %}nothing was said{% endfor %}
{%- if add_generation_prompt %}{{ bos }}assistant
{% if thinking_budget == 0 %}<seed:think><seed:cot_budget_reflect>none</seed:think>{% endif %}{% endif %}"""

OLMO = """{{ bos_token }}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}{{ '<|system|>\\n' + message['content'] + '\\n' }}
    {%- elif message['role'] == 'user' -%}{{ '<|user|>\\n' + message['content'] + '\\n' }}
    {%- elif message['role'] == 'assistant' -%}
        {{ '<|assistant|>\\n' + message['content'] + eos_token + ('' if loop.last else '\\n') }}
    {%- endif -%}
    {%- if loop.last and add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
{%- endfor -%}"""

COHERE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = false %}{%- set rest = messages %}{%- endif %}
{%- if system != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system + '<|END_OF_TURN_TOKEN|>' }}{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message['content'] | trim + '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + message['content'] | trim + '<|END_OF_TURN_TOKEN|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"""

GPT_OSS = """{%- macro type_of(spec, required) -%}
    {%- if spec.type == 'array' -%}{{ type_of(spec['items'] or {}, false) ~ '[]' }}
    {%- elif spec.enum -%}{{ spec.enum | map('tojson') | join(' | ') }}
    {%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join(' | ') }}
    {%- elif spec.type == 'object' -%}{ {%- for name, inner in (spec.properties or {}) | dictsort -%}
        {{ name ~ ('' if name in (spec.required or []) else '?') ~ ': ' ~ type_of(inner, true) }}
        {%- if not loop.last -%}{{ ', ' }}{%- endif -%}{%- endfor -%} }
    {%- else -%}{{ spec.type or 'any' }}
        {%- if spec.default is defined -%}{{ ' // ' ~ spec.default | tojson }}{%- endif -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(name, tools) -%}
    {{- '## ' ~ name ~ '\\n' }}
    {%- for tool in tools %}{%- set tool = tool.function %}
        {{- '// ' + tool.description.split('\\n')[0] + '\\ntype ' + tool.name + ' = (_: ' }}
        {{- type_of(tool.parameters, true) + ') => any;\\n' }}
    {%- endfor %}
{%- endmacro -%}
{%- set effort = reasoning_effort | default('medium') %}
{{- '<|start|>system<|message|>Date: ' + strftime_now('%Y-%m') + '\\nReasoning: ' + effort + '<|end|>' }}
{%- if messages[0].role in ['developer', 'system'] %}
    {%- set developer = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer = '' %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer or tools %}
    {{- '<|start|>developer<|message|>' + developer }}
    {%- if tools %}{{- '\\n' }}{{- namespace_of('functions', tools) }}{%- endif %}{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.thinking -%}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif -%}
        {%- if message.tool_calls -%}
            {%- set call = message.tool_calls[0].function -%}{%- set last.name = call.name -%}
            {{- '<|start|>assistant to=functions.' + last.name + '<|message|>' + call.arguments | tojson + '<|call|>' }}
        {%- else -%}{{- '<|start|>assistant<|message|>' + message.content + '<|end|>' }}{%- endif -%}
    {%- elif message.role == 'tool' -%}
        {%- if last.name is none -%}{{- raise_exception('an answer, but no call') }}{%- endif -%}
        {{- '<|start|>functions.' + last.name + '<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else -%}{{- '<|start|>user<|message|>' + message.content | string + '<|end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

FAMILY_TEMPLATES = {
    "chatml": CHATML_TOOLS, "mistral3": MISTRAL, "gemma3": GEMMA, "glm4": GLM, "phi3": PHI, "smollm3": SMOL,
    "granite": GRANITE, "seed_oss": SEED, "olmo2": OLMO, "cohere2": COHERE, "gpt-oss": GPT_OSS,
}  # fmt: skip
