class CPUAttentionBackend:
    @staticmethod
    def get_name():
        return "CPU_ATTN"
