"""kvtide's KV connector, loaded into a stock vLLM by kv_connector_module_path."""
